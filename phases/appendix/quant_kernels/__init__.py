"""Quantized layers for one token, and activations that stay in eight bits from kernel to kernel."""
