"""Phase 08: the prefix cache. What one request has computed, the next need not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chunked_prefill
from common.errors import UserError
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.llm import LLM as PagedLLM
from prefix_cache.cache import PrefixCache, PrefixStats
from prefix_cache.hash_chain import HashIndex
from prefix_cache.index import PrefixIndex
from prefix_cache.radix import RadixIndex

__all__ = ["INDEXES", "LLM", "HashIndex", "PrefixCache", "PrefixIndex", "PrefixStats", "RadixIndex", "load"]

INDEXES: dict[str, type[RadixIndex] | type[HashIndex]] = {"radix": RadixIndex, "hash": HashIndex}
"""Indexes by the name that `load` takes."""


def load(model: str | Path | Model, *, index: str = "radix", **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        index: `radix` or `hash`.
        options: see `chunked_prefill.load`.

    Raises:
        UserError: an option is out of its limits.
    """
    if index not in INDEXES:
        raise UserError(f"index is {index!r}, but must be one of {', '.join(INDEXES)}")

    def make_cache(rows: int, max_len: int, blocks: int, block_size: int) -> PrefixCache:
        return PrefixCache(rows, max_len, blocks, block_size, INDEXES[index]())

    return chunked_prefill.load(model, make_cache=make_cache, **options)


class LLM(PagedLLM):
    """See `paged_cache.llm.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)
