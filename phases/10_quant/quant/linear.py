"""A linear layer that keeps its weight in few bits, in plain torch: on any device, and fast on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import cpu
from quant.formats import Scheme
from quant.rtn import quantize, rounded
from quant.weights import QuantizedWeight


class QuantLinear(nn.Module):
    """Takes the place of an `nn.Linear`. Its tensors are buffers, so they go where the model goes."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    tiles: Tensor | None
    scale_zero: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        for name in ("data", "scale", "zero", "order"):
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("tiles", None)
        self.register_buffer("scale_zero", None)
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
        )

    @classmethod
    def of(cls, linear: nn.Linear, scheme: Scheme, name: str) -> QuantLinear:
        """The layer `name`, its weight rounded to the nearest that `scheme` has."""
        return cls(quantized(linear.weight, scheme, name), linear.bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight in the form that `QuantizedWeight` describes."""
        data = (
            self.data if self.tiles is None else cpu.from_tiles(self.tiles, self.scheme.group)
        )
        return QuantizedWeight(self.scheme, data, self.scale, self.zero, self.order)

    def pack_for_cpu(self) -> None:
        """Take the form that is the fastest to multiply with where the layer is now; no second copy stays."""
        about = self.scheme, self.shape[0]
        if self.tiles is None and self.data.device.type == "cpu" and cpu.tiles_fit(*about):
            self.tiles = cpu.to_tiles(self.data)
            self.data = self.data.new_empty((self.shape[0], 0))
            self.scale_zero = cpu.scale_zero(self.scale, self.zero)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]` in `x`'s dtype."""
        x = x if self.order is None else x.index_select(-1, self.order)
        if x.device.type == "cpu" and x.numel():
            flat = x.reshape(-1, self.shape[1])
            out = self._on_cpu(flat)
            if out is not None:
                out = out.view(*x.shape[:-1], self.shape[0])
                return out if self.bias is None else out + self.bias
        plain = replace(self.weight, order=None)
        return F.linear(
            rounded(x, self.scheme.activations), plain.dequantize().to(x.dtype), self.bias
        )

    def _on_cpu(self, x: Tensor) -> Tensor | None:
        """`[M, K]` -> `[M, N]` by what PyTorch has for this scheme, or None."""
        if self.tiles is not None and self.scale_zero is not None:
            return cpu.int4_product(x, self.tiles, self.scheme.group, self.scale_zero)
        if self.scheme.weights == "fp8" and self.scheme.scales != "block":
            return cpu.fp8_product(
                x, self.data, self.scale, self.scheme.activations is not None
            )
        if self.scheme.weights != "int8":
            return None
        if self.scheme.activations == "int8":
            return cpu.w8a8_product(x, self.data, self.scale)
        return cpu.int8_product(x, self.data, self.scale)

    def exact(self, x: Tensor) -> Tensor:
        """Dequantize, then multiply, all in float32: what `forward` and every kernel must come to."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(
            rounded(x.float(), self.scheme.activations), self.weight.dequantize(), bias
        )

    @staticmethod
    def joined(*parts: nn.Module) -> QuantLinear | None:
        """Join layers that are quantized in the same way, all with a bias or none; see phase 06's `join`."""
        found = [layer for layer in parts if isinstance(layer, QuantLinear)]
        biases = [layer.bias for layer in found if layer.bias is not None]
        alike = all(a.weight.can_concatenate(b.weight) for a, b in pairwise(found))
        if len(found) < len(parts) or len(biases) not in (0, len(parts)) or not alike:
            return None
        weight = QuantizedWeight.cat([layer.weight for layer in found])
        return QuantLinear(weight, torch.cat(tuple(biases)) if biases else None)


def quantized(weight: Tensor, scheme: Scheme, name: str) -> QuantizedWeight:
    """A layer's weight `[N, K]` rounded to nearest. Scales of groups are bfloat16 unless it is float16.

    Raises:
        UserError: no group divides its rows.
    """
    kind = torch.float16 if weight.dtype == torch.float16 else torch.bfloat16
    return quantize(weight.detach(), scheme.fitted(weight.shape[1], name), kind)
