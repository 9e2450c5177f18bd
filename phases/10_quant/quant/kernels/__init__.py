"""Triton kernels of this phase: what stands before, in and behind a product of few bits."""
