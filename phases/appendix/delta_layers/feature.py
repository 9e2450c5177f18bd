"""Layers of Qwen3.5 in few kernels, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from common.errors import UserError
from forward.loading import facts_of
from paged_cache import EngineBuilder, Feature, PagedAttention
from triton_paged_attention import Kernels
from triton_paged_attention.feature import LAYERS


@dataclass(frozen=True)
class DeltaLayers(Feature):
    """A model of Gated DeltaNet has few kernels a layer, and prompts in two parts."""

    name: ClassVar[str] = "delta_layers"
    phase: ClassVar[int] = 17

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """Return True if all layers are the kernels', and states have their cache."""
        return others.get("hybrid_cache") is not None and _whole(others.get("kernels"))

    def prepare(self, builder: EngineBuilder) -> None:
        """Replace layers as soon as the model is loaded: other features look for products later."""
        asked = builder.recipe
        if facts_of(asked.model).delta is not None and any(
            _whole(each) for each in asked.features
        ):
            builder.stages["load"].append(_fuse)

    def install(self, builder: EngineBuilder) -> None:
        """Begin steps in one kernel."""
        if builder.model.config.delta is None:
            return
        if "hybrid_cache" not in builder.features or not _whole(
            builder.features.get("kernels")
        ):
            raise UserError(
                "delta_layers is on, but hybrid_cache is off, or layers are left to torch"
            )
        builder.decorate(self, attention=lambda made: partial(_attention, made))


def _whole(kernels: Feature | None) -> bool:
    return isinstance(kernels, Kernels) and all(
        getattr(kernels, name) == "triton" for name in LAYERS
    )


def _fuse(builder: EngineBuilder) -> None:
    from hybrid_cache.qwen3_5 import Qwen35
    from phases.appendix.delta_layers.layers import fuse

    model = builder.own_model()
    if isinstance(model, Qwen35):
        fuse(model)


def _attention(made: Callable[[Any], PagedAttention], pool: Any) -> PagedAttention:
    from hybrid_cache.kernels import GroupedTriton
    from phases.appendix.delta_layers.kernels import begin

    attention = made(pool)
    assert isinstance(attention, GroupedTriton)
    attention.start = partial(begin, pool)
    return attention
