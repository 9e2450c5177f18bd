"""Layers by their definition, to measure quality with: dequantized once, and multiplied in float32.

What is measured is then the format and the method, not the rounding of one device's fastest routine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forward.model import Model
from forward.surgery import clone
from quant.formats import Activations
from quant.linear import QuantLinear
from quant.rtn import quantize_tokens


class DefinedLinear(nn.Module):
    """`QuantLinear.exact`, for many tokens."""

    def __init__(
        self, numbers: Tensor, scale: Tensor, bias: Tensor | None, inputs: Activations | None
    ) -> None:
        """numbers `[N, K]` float32, channels by `scale [N]`; inputs: what they are rounded to."""
        super().__init__()
        self.numbers = numbers
        self.scale = scale
        self.bias = bias
        self.inputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`, all float32."""
        if self.inputs is None:
            out = F.linear(x, self.numbers)
        else:
            numbers, steps = quantize_tokens(x, self.inputs)
            out = F.linear(numbers.float(), self.numbers).mul_(steps)
        out.mul_(self.scale)
        return out if self.bias is None else out.add_(self.bias)


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
