"""`python -m forward` is `ladder run 01`."""

from phases.cli import main

main(["run", "01"])
