"""`python -m batching` is `ladder run 03`."""

from phases.cli import main

main(["run", "03"])
