"""`python -m triton_paged_attention` is `ladder run 06`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "06", *sys.argv[1:]])
