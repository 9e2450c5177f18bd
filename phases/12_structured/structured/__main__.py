"""`python -m structured` is `ladder run 12`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "12", *sys.argv[1:]])
