"""Quantized layers for a few tokens, and eight bits from kernel to kernel."""
