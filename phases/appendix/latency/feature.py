"""Kernels for one token and for a few, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import Feature, Parts
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Latency(Feature):
    """Steps of one token and of a few have kernels of their own; they pay inside graphs."""

    name: ClassVar[str] = "latency"
    phase: ClassVar[int] = 9

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """Inside graphs, around the kernels' layers."""
        return others.get("graphs") is not None and isinstance(others.get("kernels"), Kernels)

    def install(self, parts: Parts) -> None:
        """Add ways to the kernels' layers, and one more kernel to their attention."""
        kernels = parts.features.get("kernels")
        if not (isinstance(kernels, Kernels) and kernels.attends):
            raise UserError("latency is True, but must be False without the kernels' layers and attention")
        from phases.appendix.latency.ways import LatencyAttention, install

        made = kernels.attention_of(LatencyAttention, install(parts.own_model()))
        parts.wrap(self, attention=lambda plain: made)
