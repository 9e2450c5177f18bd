"""`python -m speculative` is `ladder run 11`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "11", *sys.argv[1:]])
