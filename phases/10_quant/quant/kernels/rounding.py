"""Inputs in eight bits, by a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats import DTYPES, LARGEST, Activations
from triton_paged_attention.hardware import ADA, at_least


class Rounded(NamedTuple):
    """An input in eight bits: `values [T, K]`, each token to be multiplied by its `scale [T]` (float32)."""

    values: Tensor
    scale: Tensor


@triton.jit
def token_scale(top, LARGEST: tl.constexpr):
    """The scale of a token whose largest magnitude is `top`, and 1 over it; a token of zeros stays one."""
    scale = tl.maximum(top * (1.0 / LARGEST), 1.1754943508222875e-38)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def to_even(y):
    """The nearest whole number; of two that are as near, the even one."""
    down = tl.floor(y)
    rest = y - down
    odd = down - 2.0 * tl.floor(down * 0.5) > 0.5
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), down + 1.0, down)


@triton.jit
def rounded(y, LARGEST: tl.constexpr, WHOLE: tl.constexpr, HARDWARE: tl.constexpr):
    """Numbers as eight bits can hold them, in float32: whole ones, or e4m3.

    HARDWARE: it converts to e4m3 by itself. Not every GPU does, and the interpreter's conversion loses a
    carry. A number of e4m3 has three bits behind its first; below 2^-6 it is a multiple of 2^-9.
    """
    if WHOLE:
        y = to_even(tl.minimum(tl.maximum(y, -LARGEST), LARGEST))
    elif HARDWARE:
        y = y.to(tl.float8e4nv).to(tl.float32)  # nothing beyond the largest becomes more than that
    else:
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        y = tl.where(
            tl.abs(y) < 0.015625, to_even(y * 512.0) * 0.001953125, bits.to(tl.float32, bitcast=True)
        )
    return y


@triton.jit
def round_rows_kernel(
    out, out_scale, x,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """One program per token: its largest magnitude, then its numbers by the scale that follows from it."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE_PAD)
    mask = i < SIZE
    at = token * SIZE + i
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = token_scale(tl.max(tl.abs(y), axis=0), LARGEST)
    tl.store(out_scale + token, scale)
    y = rounded(y * inverse, LARGEST, WHOLE, HARDWARE)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def hardware_rounds(device: torch.device) -> bool:
    """Return whether a device converts to e4m3 by itself."""
    return device.type == "cuda" and at_least(device, ADA)


def round_rows(x: Tensor, kind: Activations) -> Rounded:
    """`x [..., K]` in eight bits, as `quant.activations.quantize_tokens` does it."""
    x = x.contiguous()
    size = x.shape[-1]
    tokens = x.numel() // size
    out = torch.empty(tokens, size, dtype=DTYPES[kind], device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    if tokens:
        round_rows_kernel[(tokens,)](
            out, scale, x, SIZE=size, SIZE_PAD=padded, LARGEST=LARGEST[kind], WHOLE=kind == "int8",
            HARDWARE=hardware_rounds(x.device), num_warps=min(16, max(1, padded // 512)),
        )  # fmt: skip
    return Rounded(out, scale)
