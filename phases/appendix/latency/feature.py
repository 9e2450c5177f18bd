"""Kernels for one token and for a few, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import EngineBuilder, Feature
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Latency(Feature):
    """Steps of one token and of a few have kernels of their own; they pay inside graphs."""

    name: ClassVar[str] = "latency"
    phase: ClassVar[int] = 9

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """Inside graphs, around the kernels' layers."""
        return others.get("graphs") is not None and isinstance(others.get("kernels"), Kernels)

    def install(self, builder: EngineBuilder) -> None:
        """Add ways to the kernels' layers, and one more kernel to their attention."""
        kernels = builder.features.get("kernels")
        if not (isinstance(kernels, Kernels) and kernels.attends):
            raise UserError(
                "latency is True, but must be False without the kernels' layers and attention"
            )
        from phases.appendix.latency.layers import LatencyAttention, install

        made = kernels.attention_of(LatencyAttention, install(builder.own_model()))
        builder.decorate(self, attention=lambda plain: made)
