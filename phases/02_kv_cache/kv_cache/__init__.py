"""Phase 02: keep every token's keys and values, so that each token is computed once."""

from __future__ import annotations

from pathlib import Path

from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from forward.model import Model
from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache
from kv_cache.generator import CachedGenerator

__all__ = ["CachedAttention", "CachedGenerator", "KVCache", "load"]


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> CachedGenerator:
    """This phase's engine for a model's name or a loaded model; see `forward.loading.load_model`."""
    return CachedGenerator(load_model(model, device=device, dtype=dtype), tokenizer)
