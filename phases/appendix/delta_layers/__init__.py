"""Layers of Qwen3.5 in few kernels."""
