"""Triton kernels of experts."""
