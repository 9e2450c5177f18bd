"""`python -m parallel` is `ladder run 14`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "14", *sys.argv[1:]])
