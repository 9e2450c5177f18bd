"""`python -m quant` is `ladder run 10`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "10", *sys.argv[1:]])
