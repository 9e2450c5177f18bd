"""Faster kernels for weights of 4 and 8 bits, as a feature of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from common.errors import UserError
from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature, find
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class QuantKernels(Feature):
    """Multiply one token with quantized weights by kernels; keep activations of more tokens in eight bits."""

    name: ClassVar[str] = "quant_kernels"
    phase: ClassVar[int] = 10
    for_draft_models: ClassVar[bool] = True

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True on a GPU if the engine uses CUDA graphs and the Triton kernels of phase 06."""
        inside = find(others, Kernels) is not None and find(others, Graphs) is not None
        return inside and device.type == "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Add kernels to quantized layers, and lay out the values of an fp8 cache in pairs."""
        if builder.feature(Kernels) is None:
            raise UserError(
                "quant_kernels is True, but must be False without the kernels' layers"
            )
        from phases.appendix.quant_kernels.layers import install
        from phases.appendix.quant_kernels.pairs import PAIRS
        from quant.kernel_layers import KernelLinear
        from quant.products import hardware_rounds

        if any(isinstance(layer, KernelLinear) for layer in builder.model.modules()):
            install(builder.own_model())
        device = builder.model.device
        converts = device.type != "cuda" or hardware_rounds(device)
        fp8 = builder.kv.part.dtype == torch.float8_e4m3fn
        if fp8 and converts and builder.block_size % 2 == 0:
            builder.kv.decorate(self, lambda kv: replace(kv, layout=PAIRS))
