"""Measurements: shared pieces of the benchmarks, and those that belong to no single phase."""
