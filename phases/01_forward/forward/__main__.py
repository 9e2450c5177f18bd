"""`python -m forward` is `ladder run 01`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "01", *sys.argv[1:]])
