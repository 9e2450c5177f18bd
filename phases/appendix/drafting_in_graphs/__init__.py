"""Speculative steps as one CUDA graph: verify, accept and draft without asking the host in between."""
