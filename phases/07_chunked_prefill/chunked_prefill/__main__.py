"""`python -m chunked_prefill` is `ladder run 07`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "07", *sys.argv[1:]])
