"""The hybrid cache as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from cuda_graphs import Graphs
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.cache import HybridCache
from hybrid_cache.layout import LayerGroups
from hybrid_cache.pool import HybridPool
from hybrid_cache.qwen3_5 import GatedDeltaNet
from hybrid_cache.state import slot_count
from hybrid_cache.state_pool import StatePool
from paged_cache import EngineBuilder, Feature, PagedAttention
from prefix_cache import INDEXES, Prefix
from triton_paged_attention import Kernels
from triton_paged_attention.feature import check_triton


@dataclass(frozen=True)
class Hybrid(Feature):
    """Layers with a window give back the blocks that no query of theirs will see again."""

    name: ClassVar[str] = "hybrid_cache"
    phase: ClassVar[int] = 17

    def configure_load(self, builder: EngineBuilder) -> None:
        """Put layers over kernels into a model with states, before other features look for products."""
        if builder.feature(Kernels) is not None:
            builder.surgeries.append(_fuse)

    def install(self, builder: EngineBuilder) -> None:
        """Another pool and cache, and attention for them. A model of one kind of layers stays as it was."""
        layout = LayerGroups.of(builder.model.config)
        if layout.plain:
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
        builder.pool.decorate(self, lambda plain: partial(_pool, builder, layout))
        builder.cache.decorate(self, lambda plain: partial(_cache, builder, layout))
        builder.attention.decorate(self, lambda plain: self._attention(builder))

    def _attention(self, builder: EngineBuilder) -> Callable[[Any], PagedAttention]:
        kernels = builder.feature(Kernels)
        if kernels is None:
            return GroupedTorch
        from hybrid_cache.kernels import GroupedTriton

        return kernels.attention_of(GroupedTriton, builder.model)


def _fuse(builder: EngineBuilder) -> None:
    """Replace the layers of a model with states by those over kernels."""
    if builder.model.config.delta is None:
        return
    check_triton(builder.model.device.type)
    from hybrid_cache.kernels import FusedDelta
    from triton_paged_attention.layers import replace as put

    put(builder.own_model(), GatedDeltaNet, FusedDelta)


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
