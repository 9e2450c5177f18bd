"""Qwen3.5's layers (Gated DeltaNet, gated attention) in fused kernels, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_cache import Hybrid
from paged_cache import EngineBuilder, Feature, PagedAttention
from triton_paged_attention import Kernels
from triton_paged_attention.feature import check_triton


@dataclass(frozen=True)
class DeltaLayers(Feature):
    """Fuse the kernels of Gated DeltaNet layers, and compute their prompts in two parts."""

    name = "delta_layers"
    phase = 17
    needs = on_with = (Hybrid, Kernels)

    def configure_load(self, builder: EngineBuilder) -> None:
        """Let the model loader replace Qwen3.5's layers by fused ones.

        This happens before other features replace the linear layers in them.
        """
        builder.surgeries.append(_fuse)

    def install(self, builder: EngineBuilder) -> None:
        """Let one kernel, not many PyTorch operations, look up KV blocks and state slots of a step.

        A slot holds the recurrent states of all Gated DeltaNet layers. Does nothing without such layers.
        """
        if builder.model.config.delta is None:
            return
        builder.attention.decorate(self, lambda made: partial(_attention, made))


def _fuse(builder: EngineBuilder) -> None:
    from hybrid_cache.states.qwen3_5 import Qwen35
    from phases.appendix.delta_layers.layers import fuse

    if isinstance(builder.model, Qwen35):
        check_triton(builder.model.device.type)
        model = builder.own_model()
        assert isinstance(model, Qwen35)
        fuse(model)


def _attention(made: Callable[[Any], PagedAttention], pool: Any) -> PagedAttention:
    from hybrid_cache.kernels import GroupedTriton
    from phases.appendix.delta_layers.kernels import begin

    attention = made(pool)
    assert isinstance(attention, GroupedTriton)
    attention.start = partial(begin, pool)
    return attention
