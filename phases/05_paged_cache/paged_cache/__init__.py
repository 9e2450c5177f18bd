"""Phase 05: the paged cache. A request's KV cache grows by blocks of one pool that all requests share."""

from __future__ import annotations

from paged_cache.allocator import BlockAllocator
from paged_cache.attention import PagedAttention, PagedBatch, TorchPagedAttention
from paged_cache.builder import EngineBuilder, PagedEngine, Slot, build
from paged_cache.cache import PagedCache
from paged_cache.pool import BlockPool, KVFormat, LayerBlocks
from paged_cache.preset import Preset
from paged_cache.recipe import Feature, PagedSizes, Recipe, find
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler

__all__ = [
    "LLM",
    "PRESET",
    "BlockAllocator",
    "BlockPool",
    "EngineBuilder",
    "Feature",
    "KVFormat",
    "LayerBlocks",
    "PagedAttention",
    "PagedBatch",
    "PagedCache",
    "PagedEngine",
    "PagedRunner",
    "PagedScheduler",
    "PagedSizes",
    "Preset",
    "Recipe",
    "Slot",
    "TorchPagedAttention",
    "build",
    "find",
    "load",
]

PRESET = Preset()
"""No features: they begin with the next phase."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`; so are the options `device` and `dtype`.
    options: `tokenizer`, needed for stop strings only, and the fields of `PagedSizes`. By default 64
        rows (a row costs next to nothing now), the model's context, blocks of 16 tokens, and 2,048 tokens
        a step (or `max_len` if that is more), which the longest request must fit in case it has to be
        computed again. On a GPU without `cache_bytes` the cache takes what weights and activations
        leave of `gpu_memory_utilization` of its memory.

Raises:
    UserError: an option is unknown or out of its limits.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
