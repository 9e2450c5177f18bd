"""Quantized products by kernels, in the places of those in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from forward.model import Model
from quant.linear import QuantLinear
from quant.products import (
    eight_bits_are_faster,
    eight_by_eight_whole,
    from_words,
    round_rows,
    to_words,
    unpack,
    words_fit,
)
from quant.weights import QuantizedWeight, pack_nibbles
from triton_paged_attention.linear import FusedLinear


class KernelLinear(QuantLinear):
    """A `QuantLinear` that is multiplied by kernels and by the library; four bits lie in words."""

    def __init__(self, linear: QuantLinear) -> None:
        weight = linear.weight
        data = to_words(weight) if weight.scheme.weights == "int4" else weight.data
        super().__init__(replace(weight, data=data), linear.bias)
        self.shape = weight.shape
        self.eight = eight_bits_are_faster(weight, data.device)

    @property
    def stored(self) -> QuantizedWeight:
        """The weight as it lies here: four bits in words, see `to_words`, and `order` left out."""
        return QuantizedWeight(self.scheme, self.data, self.scale, self.zero)

    @property
    def weight(self) -> QuantizedWeight:
        """See `QuantLinear.weight`."""
        four = self.scheme.weights == "int4"
        data = pack_nibbles(from_words(self.data, self.shape[1])) if four else self.data
        return QuantizedWeight(self.scheme, data, self.scale, self.zero, self.order)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]` in `x`'s dtype."""
        x = x if self.order is None else x.index_select(-1, self.order)
        kind = self.scheme.activations
        if kind is not None and x.numel():
            numbers = round_rows(x, kind)
            if self.eight:
                out = eight_by_eight_whole(numbers, self.stored, x.dtype).view(
                    *x.shape[:-1], self.shape[0]
                )
                return out if self.bias is None else out + self.bias
            x = (numbers.values.float() * numbers.scale[:, None]).to(x.dtype).view(x.shape)
        return F.linear(x, unpack(self.stored, self.shape[1], x.dtype), self.bias)


def install(model: Model) -> Model:
    """Put kernels in the places of quantized products, and return the model, which is the same object."""
    for fused in model.modules():
        linear = fused.linear if isinstance(fused, FusedLinear) else None
        if (
            isinstance(fused, FusedLinear)
            and isinstance(linear, QuantLinear)
            and words_fit(linear.scheme)
        ):
            fused.linear = KernelLinear(linear)
    return model


def unpacked_bytes(model: Model) -> int:
    """Bytes of the largest weight that is unpacked as a whole where it meets many tokens."""
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, KernelLinear) and not layer.eight
    ]
    return max(
        (layer.shape[0] * layer.shape[1] * model.dtype.itemsize for layer in layers), default=0
    )
