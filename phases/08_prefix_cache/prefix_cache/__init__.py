"""Phase 08: the prefix cache. What one request has computed, the next need not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from chunked_prefill import Chunked
from common.text import llm
from forward.model import Model
from paged_cache import PagedEngine, Preset
from prefix_cache.cache import PrefixCache, PrefixStats
from prefix_cache.feature import INDEXES, Prefix
from prefix_cache.hash_chain import HashIndex
from prefix_cache.index import PrefixIndex
from prefix_cache.radix import RadixIndex

__all__ = [
    "INDEXES",
    "LLM",
    "PRESET",
    "HashIndex",
    "Prefix",
    "PrefixCache",
    "PrefixIndex",
    "PrefixStats",
    "RadixIndex",
    "load",
]

PRESET = Preset(on=[Chunked, Prefix])


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of `chunked_prefill.load` and the fields of `Prefix`.

    Raises:
        UserError: an option is unknown or out of its limits.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
