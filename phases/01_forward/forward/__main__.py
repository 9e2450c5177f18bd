"""`python -m forward` is `ladder run 01`."""

import sys

from phases.cli import main

main(["run", "01", *sys.argv[1:]])
