"""`python -m continuous` is `ladder run 04`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "04", *sys.argv[1:]])
