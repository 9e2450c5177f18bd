"""Kernels for verifying in CUDA C++: see `few.cu`."""
