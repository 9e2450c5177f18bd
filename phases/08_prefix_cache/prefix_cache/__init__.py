"""Phase 08: the prefix cache. Requests share the KV cache blocks of a prefix that one has computed."""

from __future__ import annotations

from chunked_prefill import Chunked
from paged_cache import Preset
from prefix_cache.cache import PrefixCache
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
    "RadixIndex",
    "load",
]

PRESET = Preset(on=[Chunked, Prefix])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of `chunked_prefill.load` and the fields of `Prefix`.

Raises:
    UserError: an option is unknown or out of its limits.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
