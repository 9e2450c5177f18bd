"""`python -m batching` is `ladder run 03`, with the same options."""

import sys

from phases.cli import main

if __name__ == "__main__":
    main(["run", "03", *sys.argv[1:]])
