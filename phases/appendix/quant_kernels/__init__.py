"""Kernels for quantized layers: products for one token, and activations that stay in eight bits."""
