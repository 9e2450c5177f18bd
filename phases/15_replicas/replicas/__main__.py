"""`python -m replicas` is `ladder run 15`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "15", *sys.argv[1:]])
