"""The hybrid cache as an engine feature: it replaces the builder's pool, cache and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cuda_graphs import Graphs
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.cache import HybridCache
from hybrid_cache.groups import LayerGroups
from hybrid_cache.pool import HybridPool
from hybrid_cache.states.manager import slot_count
from hybrid_cache.states.pool import StatePool
from hybrid_cache.states.qwen3_5 import GatedDeltaNet
from paged_cache import EngineBuilder, Feature, PagedAttention
from prefix_cache import INDEXES, Prefix
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Hybrid(Feature):
    """The hybrid KV cache: windows give back skipped blocks, and layers with states keep slots."""

    name = "hybrid_cache"
    phase = 17

    def install(self, builder: EngineBuilder) -> None:
        """Replace the builder's block pool, cache and attention by those that keep layers in KV cache groups.

        If all layers have full attention, nothing is replaced.
        """
        layout = LayerGroups.of(builder.model.config)
        if layout.full_attention_only:
            return
        if layout.states is not None:
            each = StatePool.bytes_per_slot(layout.states, builder.model.dtype)
            builder.reservations.append(
                lambda builder: each * (slot_count(builder.max_rows) + 2)
            )
            if builder.feature(Graphs) is not None:
                from speculative.verify_graph import VerifyGraphExecutor

                # It refreshes for no works, so states would get no slots.
                builder.executors.pop(VerifyGraphExecutor, None)
            if any(isinstance(layer, GatedDeltaNet) for layer in builder.model.modules()):
                builder.executors.clear()  # the mixer in plain torch waits for the device: no graph holds it
        builder.pool.decorate(self, lambda plain: partial(_pool, builder, layout))
        builder.cache.decorate(self, lambda plain: partial(_cache, builder, layout))
        builder.attention.decorate(self, lambda plain: self._attention(builder))

    def _attention(self, builder: EngineBuilder) -> Callable[[Any], PagedAttention]:
        kernels = builder.feature(Kernels)
        if kernels is None:
            return GroupedTorch
        from hybrid_cache.kernels import GroupedTriton

        return partial(GroupedTriton, num_heads=builder.model.config.num_heads)


def _pool(
    builder: EngineBuilder, layout: LayerGroups, *args: Any, **options: Any
) -> HybridPool:
    return HybridPool(
        *args, **options, layout=layout, rows=builder.max_rows, max_len=builder.max_len
    )


def _cache(
    builder: EngineBuilder,
    layout: LayerGroups,
    rows: int,
    max_len: int,
    blocks: int,
    block_size: int,
) -> HybridCache:
    prefix = builder.feature(Prefix)
    index = None if prefix is None else INDEXES[prefix.index]()
    own = layout.blocks(blocks)
    most = builder.step_tokens  # drafts may be more than a chunk
    return HybridCache(rows, max_len, own, block_size, index, layout, step_tokens=most)
