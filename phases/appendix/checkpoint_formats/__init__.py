"""Checkpoint formats: quantized models as other tools write them, read and written."""
