"""`python -m hybrid_cache` is `ladder run 17`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "17", *sys.argv[1:]])
