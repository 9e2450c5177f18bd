"""Fused Triton kernels for the layers of Qwen3.5 (Gated DeltaNet and gated attention)."""
