"""Faster kernels for weights of few bits, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import EngineBuilder, Feature


@dataclass(frozen=True)
class QuantKernels(Feature):
    """Weights of few bits have kernels of their own for one token, and eight bits stay eight in between."""

    name: ClassVar[str] = "quant_kernels"
    phase: ClassVar[int] = 10

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """On a GPU, inside graphs, around the kernels' layers."""
        return device.type == "cuda" and {"kernels", "graphs"} <= {
            name for name, on in others.items() if on
        }

    def install(self, builder: EngineBuilder) -> None:
        """Add ways to quantized layers."""
        if "kernels" not in builder.features:
            raise UserError(
                "quant_kernels is True, but must be False without the kernels' layers"
            )
        from phases.appendix.quant_kernels.layers import install
        from quant.kernel_layers import KernelLinear

        if any(isinstance(layer, KernelLinear) for layer in builder.model.modules()):
            install(builder.own_model())
