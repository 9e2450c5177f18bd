"""Kernels of the small operators around attention: norms, RoPE, and the storing of keys and values."""
