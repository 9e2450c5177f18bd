"""Kernels for decode steps of one token, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature, find
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Latency(Feature):
    """Run steps of one token by kernels of their own, which gain inside CUDA graphs."""

    name: ClassVar[str] = "latency"
    phase: ClassVar[int] = 9
    for_draft_models: ClassVar[bool] = True

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Inside graphs, around the kernels' layers."""
        return find(others, Graphs) is not None and find(others, Kernels) is not None

    def install(self, builder: EngineBuilder) -> None:
        """Add kernels to the layers of phase 06, and one more to its blocks."""
        if builder.feature(Kernels) is None:
            raise UserError(
                "latency is True, but must be False without the kernels' layers and attention"
            )
        from phases.appendix.latency.layers import install

        install(builder.own_model())
