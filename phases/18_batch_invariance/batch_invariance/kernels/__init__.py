"""The phase's Triton kernels: a product, and attention over chunks of keys."""
