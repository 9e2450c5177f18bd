"""The hybrid cache as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from chunked_prefill import Chunked
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.cache import HybridCache
from hybrid_cache.index import NoIndex
from hybrid_cache.layout import Layout
from hybrid_cache.pool import HybridPool
from paged_cache import Feature, PagedAttention, Parts
from prefix_cache import INDEXES, Prefix
from prefix_cache.index import PrefixIndex
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Hybrid(Feature):
    """Layers with a window give back the blocks that no query of theirs will see again."""

    name: ClassVar[str] = "hybrid_cache"
    phase: ClassVar[int] = 17

    def install(self, parts: Parts) -> None:
        """Another pool and cache, and attention for them. A model of one kind of layers stays as it was."""
        layout = Layout.of(parts.model.config)
        if layout.plain:
            return
        parts.wrap(
            self,
            pool=lambda plain: partial(_pool, parts, layout),
            cache=lambda plain: partial(_cache, parts, layout),
            attention=lambda plain: self._attention(parts),
        )

    def _attention(self, parts: Parts) -> Callable[[Any], PagedAttention]:
        kernels = parts.features.get("kernels")
        if not isinstance(kernels, Kernels):
            return GroupedTorch
        from hybrid_cache.kernels import GroupedTriton

        return kernels.attention_of(GroupedTriton, parts.model)


def _pool(parts: Parts, layout: Layout, *args: Any, **options: Any) -> HybridPool:
    length = parts.sizes.context(parts.model)
    return HybridPool(*args, **options, layout=layout, rows=parts.size("max_rows"), max_len=length)


def _cache(
    parts: Parts, layout: Layout, rows: int, max_len: int, blocks: int, block_size: int
) -> HybridCache:
    prefix = parts.features.get("prefix_cache")
    index: PrefixIndex = INDEXES[prefix.index]() if isinstance(prefix, Prefix) else NoIndex()
    own = layout.blocks(blocks, parts.model.config.num_layers)
    chunked, most = parts.features.get("chunked_prefill"), parts.size("step_tokens")
    if isinstance(chunked, Chunked) and chunked.chunk_tokens is not None:
        most = min(most, chunked.chunk_tokens)
    return HybridCache(rows, max_len, own, block_size, index, layout, step_tokens=most)
