"""Kernels for a lone token in CUDA C++, where Triton has no words for what they do: see `attend.cu`."""
