"""`python -m kv_cache` is `ladder run 02`."""

from phases.cli import main

main(["run", "02"])
