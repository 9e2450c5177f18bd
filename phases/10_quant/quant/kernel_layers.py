"""Quantized layers whose products are Triton kernels and a library's, instead of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forward.model import Model
from quant.linear import QuantLinear
from quant.products import (
    eight_bits_are_faster,
    eight_by_eight,
    round_rows,
    to_words,
    unpack,
)
from quant.weights import MIDDLE, QuantizedWeight, pack_nibbles
from triton_paged_attention.linear import FusedLinear


class KernelLinear(QuantLinear):
    """A quantized linear layer for a GPU: multiplies in eight bits, or unpacks the weight first.

    eight: True if inputs are rounded to eight bits and multiplied by eight-bit weights. Four-bit numbers
        lie in int32 words, in the order of `products.to_words`.
    """

    def __init__(self, linear: QuantLinear) -> None:
        weight = linear.weight
        data = to_words(weight) if weight.scheme.weights == "int4" else weight.data
        super().__init__(replace(weight, data=data), linear.bias)
        self.shape = weight.shape
        self.eight = eight_bits_are_faster(weight, data.device)

    @property
    def stored(self) -> QuantizedWeight:
        """Return the weight as kernels read it: without `order`, and four-bit numbers in int32 words.

        Inputs have to be permuted by `order` before they are multiplied by this weight.
        """
        return QuantizedWeight(self.scheme, self.data, self.scale, self.zero)

    @property
    def weight(self) -> QuantizedWeight:
        """Return the weight in `QuantizedWeight`'s layout; four-bit numbers are unpacked from words."""
        if self.scheme.weights != "int4":
            return replace(self.stored, order=self.order)
        numbers = QuantizedWeight(self.scheme, self.data, torch.ones_like(self.scale))
        data = pack_nibbles(unpack(numbers, self.shape[1], torch.float32) + MIDDLE)
        return QuantizedWeight(self.scheme, data, self.scale, self.zero, self.order)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]` in `x`'s dtype."""
        x = x if self.order is None else x.index_select(-1, self.order)
        kind = self.scheme.activations
        if kind is not None and x.numel():
            numbers = round_rows(x, kind)
            if self.eight:
                out = eight_by_eight(numbers, self.stored, x.dtype)
                out = out.view(*x.shape[:-1], self.shape[0])
                return out if self.bias is None else out + self.bias
            x = (numbers.values.float() * numbers.scale[:, None]).to(x.dtype).view(x.shape)
        return F.linear(x, unpack(self.stored, self.shape[1], x.dtype), self.bias)


def install(model: Model) -> Model:
    """Replace the `QuantLinear` in each `FusedLinear` (phase 06) by a `KernelLinear`; return the same model.

    A layer whose group size is no multiple of 32 stays as it is.
    """
    for fused in model.modules():
        if not isinstance(fused, FusedLinear):
            continue
        linear = fused.linear
        # Words of four-bit numbers have scales of whole groups of 32 inputs.
        if isinstance(linear, QuantLinear) and linear.scheme.group % 32 == 0:
            fused.linear = KernelLinear(linear)
    return model


def unpacked_bytes(model: Model) -> int:
    """Return the bytes of the largest weight that a `KernelLinear` of the model unpacks to multiply.

    It is unpacked to the model's dtype; 0 if no weight is.
    """
    sizes = [
        layer.shape[0] * layer.shape[1]
        for layer in model.modules()
        if isinstance(layer, KernelLinear) and not layer.eight
    ]
    return max(sizes, default=0) * model.dtype.itemsize
