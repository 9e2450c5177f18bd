"""Products with weights of 8 and 4 bits on a CPU, by routines of PyTorch.

A product with a small batch waits for its weights. So fewer bytes are less time, if a routine reads them at
the speed of memory. All layers of SmolLM2 but the head, on two cores of a Xeon with AMX, in ms:

    tokens                          1      2      4      8     16     64
    float32                      16.9   17.7   27.3   31.2   39.8   73.5
    int8, `_weight_int8pack_mm`  10.2   11.4   13.8   23.6   35.8  105.4
    w8a8, `_int_mm`              15.3   15.6   16.8   17.2   19.3   78.3
    int4, `_weight_int4pack_mm`   6.3    7.2    9.0   14.6   25.2   90.5

The packed routines are fast for bfloat16 inputs only: in float32 they are slower than a plain product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forward.model import Model
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.rtn import quantize_tokens
from quant.weights import MIDDLE, QuantizedWeight, pack_nibbles, unpack_nibbles

SMALL_BATCH = 8
"""Most tokens for which `_weight_int8pack_mm` is the fastest product with int8 weights."""
INPUTS_AT_ONCE = 16
"""Inputs that it reads at a time. Where they do not divide K, it would read beyond the end of a row."""
TILED_GROUPS = (32, 64, 128, 256)
"""Group sizes that `_weight_int4pack_mm` supports."""
TILED_OUTPUTS = 16
"""It needs a multiple of this many outputs."""


class CpuLinear(QuantLinear):
    """A quantized linear layer (`QuantLinear`) whose product is computed by PyTorch's routines for a CPU.

    tiles: four-bit numbers in the order in which the routine reads them, while `data` is empty; None: the
        weight has eight bits.
    scale_zero: the scales and offsets of four-bit numbers, bfloat16 `[K / group, N, 2]`; else None.
    """

    tiles: Tensor | None
    scale_zero: Tensor | None

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__(linear.weight, linear.bias)
        tiled = self.scheme.weights == "int4"
        self.register_buffer("tiles", to_tiles(self.data) if tiled else None)
        self.register_buffer("scale_zero", offsets(self.scale, self.zero) if tiled else None)
        if tiled:
            self.data = self.data.new_empty((self.shape[0], 0))  # no second copy

    @property
    def weight(self) -> QuantizedWeight:
        """Return the weight in `QuantizedWeight`'s layout; four-bit numbers are unpacked from `tiles`."""
        data = self.data if self.tiles is None else from_tiles(self.tiles, self.scheme.group)
        return QuantizedWeight(self.scheme, data, self.scale, self.zero, self.order)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]` in `x`'s dtype."""
        if not x.numel():
            return super().forward(x)
        ordered = x if self.order is None else x.index_select(-1, self.order)
        flat = ordered.reshape(-1, self.shape[1])
        if self.tiles is not None and self.scale_zero is not None:
            out = int4_product(flat, self.tiles, self.scheme.group, self.scale_zero)
        else:
            out = eight_bit_product(flat, self.weight)
        out = out.view(*x.shape[:-1], self.shape[0])
        return out if self.bias is None else out + self.bias


def install(model: Model) -> None:
    """Replace each `QuantLinear` of a model on a CPU by a `CpuLinear`, if PyTorch has a routine for it.

    The model is changed in place.
    """
    for name, layer in list(model.named_modules()):
        if type(layer) is QuantLinear and has_routine(layer.scheme, layer.shape[0]):
            model.set_submodule(name, CpuLinear(layer))


def has_routine(scheme: Scheme, outputs: int) -> bool:
    """Return True if PyTorch has a product for a weight of this scheme with `outputs` rows."""
    if scheme.weights == "int4":
        return scheme.group in TILED_GROUPS and outputs % TILED_OUTPUTS == 0
    return scheme.scales == "channel"


def eight_bit_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return `x [M, K]` times an eight-bit weight with scales by channel: `[M, N]` in `x`'s dtype.

    Inputs are rounded to eight bits only if the weight's scheme has `activations`. Eight-bit numbers are
    exact in bfloat16. Scales are not exact there, so they are applied last.
    """
    data, kind = weight.data, weight.scheme.activations
    numbers, scale = (x, 1.0) if kind is None else quantize_tokens(x, kind)
    small = len(x) <= SMALL_BATCH and data.shape[1] % INPUTS_AT_ONCE == 0
    if kind == "int8":
        sums = torch._int_mm(numbers, data.t())
    elif small and data.dtype == torch.int8:
        ones = torch.ones(len(data), dtype=torch.bfloat16)
        sums = torch._weight_int8pack_mm(x.bfloat16(), data, ones)
    else:
        sums = F.linear(numbers.bfloat16(), data.bfloat16())
    return (sums.float() * scale * weight.scale).to(x.dtype)


def to_tiles(data: Tensor) -> Tensor:
    """Return four-bit numbers in the order in which torch's `_weight_int4pack_mm` reads them.

    data: `[N, K / 2]` uint8, two numbers a byte.
    """
    numbers = unpack_nibbles(data).to(torch.int32)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)


def from_tiles(tiles: Tensor, group: int) -> Tensor:
    """Return the four-bit numbers `[N, K / 2]` uint8, two a byte, from which `to_tiles` made `tiles`.

    They are read by a product with the identity, for the order of tiles depends on the processor.
    group: neighbouring inputs that share a scale.
    """
    outputs, inputs = tiles.shape[0], tiles.shape[1] * 2
    ones = offsets(torch.ones(outputs, inputs // group), None)
    return pack_nibbles(int4_product(torch.eye(inputs), tiles, group, ones).t() + MIDDLE)


def offsets(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Convert scales and zero points `[N, K / g]` to what torch's `_weight_int4pack_mm` reads.

    zero: uint8; None: 8.

    Returns:
        bfloat16 `[K / g, N, 2]`: a group's scale, and the weight that the number 8 stands for.
    """
    scale = scale.float()
    middle = torch.zeros_like(scale) if zero is None else (MIDDLE - zero.float()) * scale
    return torch.stack([scale, middle], dim=-1).transpose(0, 1).bfloat16().contiguous()


def int4_product(x: Tensor, tiles: Tensor, group: int, scale_zero: Tensor) -> Tensor:
    """Return `x [M, K]` times a four-bit weight: `[M, N]` in `x`'s dtype.

    tiles: the numbers, in the order of `to_tiles`. group: inputs that share a scale. scale_zero:
        `[K / group, N, 2]` bfloat16, scales and offsets.
    """
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), tiles, group, scale_zero)
    return out.to(x.dtype)
