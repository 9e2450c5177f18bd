"""`python -m experts` is `ladder run 16`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "16", *sys.argv[1:]])
