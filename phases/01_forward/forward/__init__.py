"""Phase 01: a transformer's forward pass, and the naive loop that generates with it."""

from __future__ import annotations

from pathlib import Path

from common.text.tokenizer import Tokenizer
from forward.generator import Generator
from forward.loading import load_model, random_model
from forward.model import Model

__all__ = ["Generator", "Model", "load", "load_model", "random_model"]


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> Generator:
    """This phase's engine for a model's name or a loaded model; see `forward.loading.load_model`."""
    return Generator(load_model(model, device=device, dtype=dtype), tokenizer)
