"""Sums over ranks in kernels of our own, over memory that all ranks can read and write."""
