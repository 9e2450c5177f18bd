"""`python -m paged_cache` is `ladder run 05`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "05", *sys.argv[1:]])
