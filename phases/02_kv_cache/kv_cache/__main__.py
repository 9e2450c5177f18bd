"""`python -m kv_cache` is `ladder run 02`."""

import sys

from phases.cli import main

main(["run", "02", *sys.argv[1:]])
