"""Triton kernels whose bits no batch changes: a matrix product, and attention over chunks of keys."""
