"""Phase 01: a transformer's forward pass, and the naive loop that generates with it."""

from __future__ import annotations

from forward.generator import Generator
from forward.loading import load_model, random_model
from forward.model import Model

__all__ = ["Generator", "Model", "load", "load_model", "random_model"]

load = Generator.load
