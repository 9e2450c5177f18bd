"""`python -m batching` is `ladder run 03`."""

import sys

from phases.cli import main

main(["run", "03", *sys.argv[1:]])
