"""Layers by their definition, to measure quality with: dequantized once, and multiplied in float32.

What is measured is then the format and the method, not the rounding of one device's fastest routine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forward.model import Model
from forward.surgery import clone
from quant.formats import Activations
from quant.linear import QuantLinear
from quant.rtn import quantize_tokens


class DefinedLinear(nn.Module):
    """`QuantLinear.exact`, for many tokens.

    On a CPU with AMX a product of float32 is up to three of bfloat16, which together take a third of its
    time: a number is its bfloat16 plus what is left, in bfloat16 as well, plus less than its 2^17th part. Of
    FP8 and INT8 nothing is left.
    """

    def __init__(
        self, numbers: Tensor, scale: Tensor, bias: Tensor | None, inputs: Activations | None
    ) -> None:
        """numbers `[N, K]` float32, channels by `scale [N]`; inputs: what they are rounded to."""
        super().__init__()
        self.numbers = numbers
        self.scale = scale
        self.bias = bias
        self.inputs = inputs
        self.in_parts = in_parts(numbers.device)
        rest = left(numbers) if self.in_parts else None
        self.rest = rest if rest is not None and bool(rest.any()) else None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`, all float32."""
        if self.inputs is None:
            out = self._product(x)
        else:
            numbers, steps = quantize_tokens(x, self.inputs)
            out = self._product(numbers.float()).mul_(steps)
        out.mul_(self.scale)
        return out if self.bias is None else out.add_(self.bias)

    def _product(self, x: Tensor) -> Tensor:
        if not self.in_parts:
            return F.linear(x, self.numbers)
        with rounding():
            out = F.linear(x, self.numbers)
            if self.inputs is None:
                out.add_(F.linear(left(x), self.numbers))
            return out if self.rest is None else out.add_(F.linear(x, self.rest))


def in_parts(device: torch.device) -> bool:
    """Whether products of bfloat16 are so much faster here that three of them pay."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return device.type == "cpu" and bool(amx()) and hasattr(torch.backends.mkldnn, "matmul")


def left(x: Tensor) -> Tensor:
    """What bfloat16 leaves of `x`."""
    return x - x.bfloat16()


@contextmanager
def rounding() -> Iterator[None]:
    """Products of float32 round both sides to bfloat16 and sum in float32."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def defined(model: Model) -> Model:
    """A copy of a float32 model with every linear layer, plain or quantized, by its definition."""
    model = clone(model)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, QuantLinear | nn.Linear):
            continue
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, defined_layer(layer))
    return model


def defined_layer(layer: QuantLinear | nn.Linear) -> DefinedLinear:
    """One layer of a float32 model."""
    one = torch.ones(1, device=layer.weight.data.device)
    if isinstance(layer, nn.Linear):
        return DefinedLinear(layer.weight.detach(), one, layer.bias, None)
    weight, inputs = layer.weight, layer.scheme.activations
    if layer.scheme.scales == "channel":
        return DefinedLinear(weight.data.float(), weight.scale, layer.bias, inputs)
    return DefinedLinear(weight.dequantize(), one, layer.bias, inputs)
