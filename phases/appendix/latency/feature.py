"""Kernels for decode steps of 1 to 8 tokens, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from common.errors import UserError
from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature, find
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Latency(Feature):
    """Run decode steps of a single request by kernels of their own, which gain inside CUDA graphs."""

    name: ClassVar[str] = "latency"
    phase: ClassVar[int] = 9
    for_draft_models: ClassVar[bool] = True

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True if the engine uses CUDA graphs and the Triton kernels of phase 06."""
        return find(others, Graphs) is not None and find(others, Kernels) is not None

    def install(self, builder: EngineBuilder) -> None:
        """Add latency kernels to the model's fused layers, and one more kernel to its attention."""
        if builder.feature(Kernels) is None:
            raise UserError(
                "latency is True, but must be False without the kernels' layers and attention"
            )
        from phases.appendix.latency.layers import LatencyAttention, install

        model = install(builder.own_model())
        made = partial(LatencyAttention, num_heads=model.config.num_heads)
        builder.attention.decorate(self, lambda plain: made)
