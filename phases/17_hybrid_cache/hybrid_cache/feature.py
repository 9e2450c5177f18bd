"""The hybrid cache as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from forward.loading import facts_of
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.cache import HybridCache
from hybrid_cache.layout import LayerGroups
from hybrid_cache.pool import HybridPool
from hybrid_cache.qwen3_5 import GatedDeltaNet
from hybrid_cache.state import slot_count
from hybrid_cache.state_pool import StatePool
from paged_cache import EngineBuilder, Feature, PagedAttention
from prefix_cache import INDEXES, Prefix
from speculative import Speculate
from triton_paged_attention import Kernels
from triton_paged_attention.feature import check_triton


class OnHost(Speculate):
    """Guesses that are proposed and verified in two steps, since the cache comes between them."""

    whole: ClassVar[bool] = False


@dataclass(frozen=True)
class Hybrid(Feature):
    """Layers with a window give back the blocks that no query of theirs will see again."""

    name: ClassVar[str] = "hybrid_cache"
    phase: ClassVar[int] = 17

    def prepare(self, builder: EngineBuilder) -> None:
        """Keep guesses out of graphs for a model with states, which go back on the host."""
        asked = builder.recipe
        if facts_of(asked.model).delta is not None:
            features = (
                OnHost(**vars(each)) if isinstance(each, Speculate) and each.whole else each
                for each in asked.features
            )
            builder.recipe = replace(asked, features=tuple(features))
            if any(isinstance(each, Kernels) for each in asked.features):
                builder.stages.get("load", []).append(_fuse)

    def install(self, builder: EngineBuilder) -> None:
        """Another pool and cache, and attention for them. A model of one kind of layers stays as it was."""
        layout = LayerGroups.of(builder.model.config)
        if layout.plain:
            return
        if layout.states is not None:
            each = StatePool.bytes_per_slot(layout.states, builder.model.dtype)
            builder.reserve.append(
                lambda whole: each * (slot_count(whole.size("max_rows")) + 2)
            )
            builder.plans.pop("verify", None)  # it refreshes for no works: states get no slots
        builder.decorate(
            self,
            pool=lambda plain: partial(_pool, builder, layout),
            cache=lambda plain: partial(_cache, builder, layout),
            attention=lambda plain: self._attention(builder),
        )

    def _attention(self, builder: EngineBuilder) -> Callable[[Any], PagedAttention]:
        kernels = builder.features.get("kernels")
        if not isinstance(kernels, Kernels):
            return GroupedTorch
        from hybrid_cache.kernels import GroupedTriton

        return kernels.attention_of(GroupedTriton, builder.model)


def _fuse(builder: EngineBuilder) -> None:
    """Put layers over kernels into a model with states, before other features look for products."""
    check_triton(builder.model.device.type)
    from hybrid_cache.kernels import FusedDelta
    from triton_paged_attention.layers import replace as put

    put(builder.own_model(), GatedDeltaNet, FusedDelta)


def _pool(
    builder: EngineBuilder, layout: LayerGroups, *args: Any, **options: Any
) -> HybridPool:
    length = builder.sizes.context(builder.model)
    return HybridPool(
        *args, **options, layout=layout, rows=builder.size("max_rows"), max_len=length
    )


def _cache(
    builder: EngineBuilder,
    layout: LayerGroups,
    rows: int,
    max_len: int,
    blocks: int,
    block_size: int,
) -> HybridCache:
    prefix = builder.features.get("prefix_cache")
    index = INDEXES[prefix.index]() if isinstance(prefix, Prefix) else None
    own = layout.blocks(blocks)
    most = builder.size("step_tokens")  # drafts may be more than a chunk
    return HybridCache(rows, max_len, own, block_size, index, layout, step_tokens=most)
