"""`python -m cuda_graphs` is `ladder run 09`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "09", *sys.argv[1:]])
