"""The hybrid cache as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from forward.loading import facts_of
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.cache import HybridCache
from hybrid_cache.groups import LayerGroups
from hybrid_cache.pool import HybridPool
from hybrid_cache.states.manager import slot_count
from hybrid_cache.states.pool import StatePool
from hybrid_cache.states.qwen3_5 import GatedDeltaNet
from paged_cache import EngineBuilder, Feature, PagedAttention
from prefix_cache import INDEXES, Prefix
from speculative import Speculate
from triton_paged_attention import Kernels


class OnHost(Speculate):
    """Guesses that are proposed and verified in two steps, since the cache comes between them."""

    whole: ClassVar[bool] = False


@dataclass(frozen=True)
class Hybrid(Feature):
    """The hybrid KV cache: windows give back skipped blocks, and layers with states keep slots."""

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

    def install(self, builder: EngineBuilder) -> None:
        """Put in the pool, the cache and attention over groups, unless all layers have full attention."""
        layout = LayerGroups.of(builder.model.config)
        if layout.full_attention_only:
            return
        if layout.states is not None:
            each = StatePool.bytes_per_slot(layout.states, builder.model.dtype)
            builder.reserve.append(
                lambda whole: each * (slot_count(whole.size("max_rows")) + 2)
            )
            builder.plans.pop("verify", None)  # it refreshes for no works: states get no slots
            if any(isinstance(layer, GatedDeltaNet) for layer in builder.model.modules()):
                builder.plans.clear()  # the mixer in plain torch waits for the device: no graph holds it
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
