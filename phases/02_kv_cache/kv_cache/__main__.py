"""`python -m kv_cache` is `ladder run 02`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "02", *sys.argv[1:]])
