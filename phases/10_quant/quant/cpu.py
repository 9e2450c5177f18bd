"""Products with weights of 8 and 4 bits on a CPU, by what PyTorch brings for them.

A product with a few tokens waits for its weights, so bytes are time, if the routine reads them at the speed
of memory. All layers of SmolLM2 but the head, on two cores of a Xeon with AMX, ms:

    tokens                          1      2      4      8     16     64
    float32                      16.9   17.7   27.3   31.2   39.8   73.5
    int8, `_weight_int8pack_mm`  10.2   11.4   13.8   23.6   35.8  105.4
    int8, input in two parts     19.0   19.6   21.6   24.1   30.4  289.2
    w8a8, `_int_mm`              15.3   15.6   16.8   17.2   19.3   78.3
    int4, `_weight_int4pack_mm`   6.3    7.2    9.0   14.6   25.2   90.5

The packed routines are fast for bfloat16 inputs only: in float32 they are slower than a plain product.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.formats import Scheme
from quant.rtn import quantize_tokens
from quant.weights import MIDDLE, pack_nibbles, unpack_nibbles

SMALL_BATCH = 8
"""Up to how many tokens int8 weights are read by the routine for few."""
SOME = 32
"""Up to how many tokens the input goes in two parts of eight bits."""
_STEP = 16
"""The routine for few reads so many inputs at a time: where they do not divide a row, beyond its end."""
_GROUPS = (32, 64, 128, 256)
"""Sizes of groups that the four-bit routine knows."""
_OUTPUTS = 16
"""It takes so many outputs at a time."""
_LOWER = 254.0
"""How much finer the second part's steps are: half a step of the first is 127 of them."""


def int8_product(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """`x [M, K]` times int8 `data [N, K]`, channels by `scale [N]` float32 -> `[M, N]` in `x`'s dtype."""
    if len(x) <= SMALL_BATCH and data.shape[1] % _STEP == 0:
        # The scale afterwards: the routine would round it to bfloat16 first.
        out = (
            torch._weight_int8pack_mm(x.bfloat16(), data, _ones(len(data))).float().mul_(scale)
        )
    elif len(x) <= SOME:
        numbers, steps = _two_parts(x)
        sums = torch._int_mm(numbers, data.t()).float()  # [2 M, N], exact
        out = sums[: len(x)].add_(sums[len(x) :], alpha=1 / _LOWER).mul_(steps).mul_(scale)
    else:
        out = (
            F.linear(x.bfloat16(), data.bfloat16()).float().mul_(scale)
        )  # int8 is exact in bfloat16
    return out.to(x.dtype)


@cache
def _ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bfloat16)


def _two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[M, K]` -> int8 `[2 M, K]`, and steps `[M, 1]`: first what int8 holds of each, then what is left.

    So 16 bits of each input go through a product of integers, which is exact.
    """
    x = x.float()
    step = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp_min_(
        torch.finfo(torch.float32).tiny
    )
    x = x / step
    coarse = x.round()
    fine = x.sub_(coarse).mul_(_LOWER).round_()
    return torch.cat([coarse, fine]).to(torch.int8), step


def w8a8_product(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    """The same with the input rounded to int8, token by token: one product of integers."""
    numbers, steps = quantize_tokens(x, "int8")
    return torch._int_mm(numbers, data.t()).float().mul_(steps).mul_(scale).to(x.dtype)


def fp8_product(x: Tensor, data: Tensor, scale: Tensor, rounds: bool) -> Tensor:
    """`x [M, K]` times FP8 `data [N, K]`, channels by `scale [N]` -> `[M, N]` in `x`'s dtype.

    No routine reads FP8 on a CPU: at each call the weight is written out as bfloat16, which holds it exactly.

    rounds: the input is rounded to FP8, token by token.
    """
    if not rounds:
        return F.linear(x.bfloat16(), e4m3_to_bfloat16(data)).float().mul_(scale).to(x.dtype)
    numbers, steps = quantize_tokens(x, "fp8")
    out = F.linear(numbers.bfloat16(), e4m3_to_bfloat16(data)).float()
    return out.mul_(steps).mul_(scale).to(x.dtype)


def e4m3_to_bfloat16(data: Tensor) -> Tensor:
    """The same numbers, in a fifth of the time of `Tensor.to`, which converts them one by one.

    Sign to sign, and the seven bits of exponent and fraction four places up: that is the number over 2^120,
    since the exponents' zeros are 7 and 127.
    """
    bits = data.view(torch.int8).to(torch.int16)  # the sign is in the highest bit already
    rest = (bits << 4).bitwise_and_(0x7F0)
    return bits.bitwise_and_(-0x8000).bitwise_or_(rest).view(torch.bfloat16).mul_(2.0**120)


def tiles_fit(scheme: Scheme, n: int) -> bool:
    """Return True if the four-bit routine can read weights of a scheme with `n` outputs."""
    return scheme.weights == "int4" and scheme.group in _GROUPS and n % _OUTPUTS == 0


def to_tiles(data: Tensor) -> Tensor:
    """Four-bit numbers `[N, K / 2]` in the order in which the routine reads them."""
    numbers = unpack_nibbles(data).to(torch.int32)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)


def from_tiles(tiles: Tensor, group: int) -> Tensor:
    """The way back: a product with the identity, since the order of tiles depends on the processor."""
    n, k = tiles.shape[0], tiles.shape[1] * 2
    plain = (
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(k // group, n, 2).contiguous()
    )
    numbers = torch.ops.aten._weight_int4pack_mm_for_cpu(
        torch.eye(k).bfloat16(), tiles, group, plain
    )
    return pack_nibbles((numbers.t().float() + MIDDLE).round())


def scale_zero(scale: Tensor, zero: Tensor | None) -> Tensor:
    """`scale` and `zero [N, K / g]` as the routine wants them: `[K / g, N, 2]`, what 8 stands for last."""
    offset = (
        torch.zeros_like(scale) if zero is None else (MIDDLE - zero.float()) * scale.float()
    )
    return (
        torch.stack([scale.float(), offset.float()], dim=-1)
        .transpose(0, 1)
        .bfloat16()
        .contiguous()
    )


def int4_product(x: Tensor, tiles: Tensor, group: int, scale_zero: Tensor) -> Tensor:
    """`x [M, K]` times four-bit `tiles` of `[N, K]` -> `[M, N]` in `x`'s dtype."""
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), tiles, group, scale_zero)
    return out.to(x.dtype)
