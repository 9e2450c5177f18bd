"""Quantized layers in the places of phase 06's: projections of one input are joined."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from quant.linear import QuantLinear, end_to_end, joinable
from triton_paged_attention.linear import FusedLinear, SideBySide


class QuantFusedLinear(FusedLinear):
    """A `FusedLinear` whose weight is a `QuantizedWeight`; its product is that of a `QuantLinear`."""

    def __init__(self, linear: QuantLinear) -> None:
        nn.Module.__init__(self)
        self.linear = linear

    @classmethod
    def of(cls, *parts: nn.Module) -> Self:
        """Of `joinable` layers."""
        assert joinable(parts)
        return cls(end_to_end(parts))

    def product(self, x: Tensor) -> Tensor:
        """See `FusedLinear.product`."""
        return self.linear(x)


def joined(*parts: nn.Module) -> FusedLinear:
    """Layers of one input, of which some are quantized, as one; side by side if they do not go together."""
    return QuantFusedLinear.of(*parts) if joinable(parts) else SideBySide(*parts)
