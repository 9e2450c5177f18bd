"""Kernels are compiled before a request waits for them."""
