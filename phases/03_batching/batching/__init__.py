"""Phase 03: serve requests in fixed, left-padded batches, so that a step reads the weights once for all."""

from __future__ import annotations

from pathlib import Path

from batching.attention import PaddedAttention
from batching.generator import BatchGenerator, Waste
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from forward.model import Model

__all__ = ["BatchGenerator", "PaddedAttention", "Waste", "load"]


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    batch_size: int = 16,
    compact: bool = False,
) -> BatchGenerator:
    """Return this phase's engine for a model's name or a loaded model.

    device, dtype: where to load the model and in which format. tokenizer: for stop strings only.
    batch_size: rows in a batch. compact: drop finished rows from the batch as they finish.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    return BatchGenerator(loaded, tokenizer, batch_size=batch_size, compact=compact)
