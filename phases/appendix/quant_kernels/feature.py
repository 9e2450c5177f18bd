"""Faster kernels for weights of 4 and 8 bits, as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class QuantKernels(Feature):
    """Multiply one token with quantized weights by kernels; keep activations of more tokens in eight bits."""

    name = "quant_kernels"
    phase = 10
    for_draft_models = True
    needs = (Kernels,)
    on_with = (Graphs, Kernels)
    on_device = "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Add kernels to quantized layers, and store the values of an fp8 KV cache in pairs of tokens.

        In a pair, the bytes of two tokens alternate. That needs blocks with an even number of tokens, and a
        GPU that converts e4m3.
        """
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
