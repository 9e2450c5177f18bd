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
from paged_cache import Feature, PagedAttention, Parts
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

    def prepare(self, parts: Parts) -> None:
        """Keep guesses out of graphs for a model with states, which go back on the host."""
        asked = parts.recipe
        if facts_of(asked.model).delta is not None:
            features = (
                OnHost(**vars(each)) if isinstance(each, Speculate) and each.whole else each
                for each in asked.features
            )
            parts.recipe = replace(asked, features=tuple(features))
            if any(isinstance(each, Kernels) for each in asked.features):
                parts.stages.get("load", []).append(_fuse)

    def install(self, parts: Parts) -> None:
        """Another pool and cache, and attention for them. A model of one kind of layers stays as it was."""
        layout = LayerGroups.of(parts.model.config)
        if layout.plain:
            return
        if layout.states is not None:
            each = StatePool.bytes_per_slot(layout.states, parts.model.dtype)
            parts.reserve.append(lambda whole: each * (slot_count(whole.size("max_rows")) + 2))
            parts.plans.pop("verify", None)  # it refreshes for no works: states get no slots
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


def _fuse(parts: Parts) -> None:
    """Put layers over kernels into a model with states, before other features look for products."""
    check_triton(parts.model.device.type)
    from hybrid_cache.kernels import FusedDelta
    from triton_paged_attention.layers import replace as put

    put(parts.own_model(), GatedDeltaNet, FusedDelta)


def _pool(parts: Parts, layout: LayerGroups, *args: Any, **options: Any) -> HybridPool:
    length = parts.sizes.context(parts.model)
    return HybridPool(*args, **options, layout=layout, rows=parts.size("max_rows"), max_len=length)


def _cache(
    parts: Parts, layout: LayerGroups, rows: int, max_len: int, blocks: int, block_size: int
) -> HybridCache:
    prefix = parts.features.get("prefix_cache")
    index = INDEXES[prefix.index]() if isinstance(prefix, Prefix) else None
    own = layout.blocks(blocks)
    most = parts.size("step_tokens")  # drafts may be more than a chunk
    return HybridCache(rows, max_len, own, block_size, index, layout, step_tokens=most)
