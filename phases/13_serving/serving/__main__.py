"""`python -m serving` is `ladder serve`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
