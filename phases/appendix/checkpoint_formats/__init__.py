"""Checkpoint formats: load quantized models as other tools (AutoGPTQ, AutoAWQ, LLM Compressor) write them."""
