"""A linear layer with a quantized weight, in plain PyTorch on any device."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.formats import Scheme
from quant.rtn import quantize, rounded
from quant.weights import QuantizedWeight


class QuantLinear(nn.Module):
    """A linear layer with a `QuantizedWeight` (4 or 8 bits); it replaces an `nn.Linear`.

    The weight's tensors are buffers, so they move with the model. The weight is dequantized at each call:
    `cpu.CpuLinear` and `kernel_layers.KernelLinear` are the same layer with faster products.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zero", weight.zero)
        self.register_buffer("order", weight.order)
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
        )

    @classmethod
    def of(cls, linear: nn.Linear, scheme: Scheme, name: str) -> QuantLinear:
        """Return a quantized layer for `linear`: its weight is rounded to the nearest numbers of `scheme`.

        name: of the layer, for messages.
        """
        return cls(quantized(linear.weight, scheme, name), linear.bias)

    @property
    def weight(self) -> QuantizedWeight:
        """Return the layer's weight in the layout that `QuantizedWeight` describes."""
        return QuantizedWeight(self.scheme, self.data, self.scale, self.zero, self.order)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]` in `x`'s dtype."""
        return self.exact(x).to(x.dtype)

    def exact(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]`, computed in float32 from the dequantized weight.

        Round the input if the scheme says so, dequantize the weight, multiply, and add the bias. Every faster
        product is tested against this one.
        """
        bias = None if self.bias is None else self.bias.float()
        inputs = rounded(x.float(), self.scheme.activations)
        return F.linear(inputs, self.weight.dequantize(), bias)

    @staticmethod
    def joined(*parts: nn.Module) -> QuantLinear | None:
        """Return one quantized layer whose output concatenates those of several with the same input.

        parts: the layers. Their weights and biases are copied.

        Returns:
            None if a layer is not quantized, weights cannot be joined, or only some have a bias.
        """
        layers = [layer for layer in parts if isinstance(layer, QuantLinear)]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weights = [layer.weight for layer in layers]
        if len(layers) < len(parts) or len(biases) not in (0, len(parts)):
            return None
        if not all(first.can_concatenate(second) for first, second in pairwise(weights)):
            return None
        bias = torch.cat(tuple(biases)) if biases else None
        return QuantLinear(QuantizedWeight.cat(weights), bias)


def quantized(weight: Tensor, scheme: Scheme, name: str) -> QuantizedWeight:
    """Return the weight `[N, K]` rounded to the nearest numbers of `scheme`.

    name: of the layer, for messages. Scales of groups are bfloat16, or float16 if the weight is. If the
        scheme's groups do not divide K, smaller ones are used.

    Raises:
        UserError: no size of group divides K.
    """
    kind = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    return quantize(weight.detach(), scheme.fitted(weight.shape[1], name), kind)
