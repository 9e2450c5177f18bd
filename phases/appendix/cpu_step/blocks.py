"""Products with a GGUF file's quantized weights in C++, as a feature of an engine."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_cache import EngineBuilder, Feature
from phases.appendix.cpu_step.feature import (
    SIDE,
    CpuStep,
    Operator,
    block_fields,
    call_step,
    library,
    make_operator,
    whole_tiles,
)
from quant.blocks import BlockLinear


class BlockProduct:
    """The product of inputs with a GGUF file's quantized weights, in C++.

    A call unpacks each row of the weight once for all its tokens. Set as `product` of a `BlockLinear`.

    library: the compiled `step.cpp`. layer: whose weight is multiplied.
    """

    def __init__(self, library: CDLL, layer: BlockLinear) -> None:
        self.call = library.run
        self.operators = (Operator * 1)(
            make_operator(0, layer.shape[1], **block_fields(layer))
        )

    def __call__(self, layer: BlockLinear, x: Tensor) -> Tensor:
        """Return `x [..., K]` times the layer's weight `[N, K]`, transposed: `[..., N]` float32, no bias."""
        outputs, inputs = layer.shape
        flat = x.reshape(-1, inputs)
        space = torch.empty(whole_tiles(len(flat)), inputs + outputs)
        space[: len(flat), :inputs] = flat
        space[len(flat) :, :inputs] = 0
        call_step(self.call, self.operators, space, len(flat))
        return space[: len(flat), inputs:].view(*x.shape[:-1], outputs)


@dataclass(frozen=True)
class CpuBlocks(Feature):
    """Linear layers with a GGUF file's quantized weights multiply float32 inputs in compiled C++."""

    name = "cpu_blocks"
    phase = 10
    on_with = (CpuStep,)

    def install(self, builder: EngineBuilder) -> None:
        """Let the model's layers with a GGUF file's weights multiply in C++, if the model is on a CPU.

        Without a C++ compiler nothing changes.
        """
        layers = [layer for layer in builder.model.modules() if isinstance(layer, BlockLinear)]
        compiled = library() if layers and builder.model.device.type == "cpu" else None
        if compiled is None:
            return
        for layer in builder.own_model().modules():
            if isinstance(layer, BlockLinear) and layer.shape[0] % SIDE == 0:
                layer.product = BlockProduct(compiled, layer)
