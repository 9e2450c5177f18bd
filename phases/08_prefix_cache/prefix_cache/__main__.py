"""`python -m prefix_cache` is `ladder run 08`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "08", *sys.argv[1:]])
