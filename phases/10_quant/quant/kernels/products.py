"""Products of many tokens: eight bits by eight bits where both are so, otherwise unpacked and multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quant.formats import BLOCK
from quant.kernels.rounding import Rounded
from quant.weights import QuantizedWeight
from triton_paged_attention.hardware import ADA, TURING, at_least

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LEAST_ROWS = 32
"""What the library's product of whole numbers wants at least (it asks for more than 16)."""


class Unscaled(NamedTuple):
    """A product that still has to be multiplied: `values [T, N]` by `rows [T]` and `columns [N]`, float32."""

    values: Tensor
    rows: Tensor
    columns: Tensor

    def finished(self, dtype: torch.dtype) -> Tensor:
        """Return the product itself: `[T, N]`."""
        return (self.values.float() * self.rows[:, None] * self.columns).to(dtype)


def scales_inside(x: Rounded, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether the library multiplies by the scales itself."""
    return x.values.is_cuda and weight.data.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16


def unscaled(x: Rounded, weight: QuantizedWeight) -> Unscaled:
    """`x` times an eight-bit weight with scales by channel, still to be multiplied by both scales."""
    values, data = x.values, weight.data
    if values.is_cuda and data.dtype == torch.float8_e4m3fn:
        one = _one(values.device)
        # Sums of such products overflow float16.
        out = torch._scaled_mm(
            values, data.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    elif values.is_cuda:
        short = max(0, LEAST_ROWS - len(values))
        out = torch._int_mm(F.pad(values, (0, 0, 0, short)) if short else values, data.t())[: len(values)]
    else:
        out = F.linear(values.float(), data.float())
    return Unscaled(out, x.scale, weight.scale)


def eight_by_eight_whole(x: Rounded, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """`x` times an eight-bit weight with scales by channel: `[T, N]`."""
    if scales_inside(x, weight, dtype):
        return torch._scaled_mm(
            x.values, weight.data.t(), scale_a=x.scale[:, None], scale_b=weight.scale[None],
            out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip
    return unscaled(x, weight).finished(dtype)


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    if device not in _ones:
        _ones[device] = torch.ones((), device=device)
    return _ones[device]


def eight_pays(weight: QuantizedWeight, device: torch.device) -> bool:
    """Return True if eight by eight is a product that the device has, for this weight."""
    n, k = weight.shape
    if weight.scheme.activations is None or weight.scheme.scales != "channel" or weight.order is not None:
        return False
    if device.type != "cuda":
        return True
    return at_least(device, ADA if weight.scheme.weights == "fp8" else TURING) and n % 16 == k % 16 == 0


@triton.jit
def unpack8_kernel(
    out, data, scale, scale_stride,
    K: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program per row and part of it."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(data + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if SIDE == 0:
        s = tl.load(scale + row)
    else:
        s = tl.load(scale + row // SIDE * scale_stride + k // SIDE, mask=k < K, other=0.0)
    tl.store(out + row * K + k, (w * s).to(HALF), mask=k < K)


@triton.jit
def unpack4_kernel(
    out, words, scale, zero, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, WORDS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """One program per row and `WORDS` of its words; see `words.SPAN`."""
    row = tl.program_id(0).to(tl.int64)
    SPANS: tl.constexpr = (K + 127) // 128
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    w = tl.load(words + row * SPANS * 16 + word, mask=word < SPANS * 16, other=0)
    for part in tl.static_range(4):
        k = word // 16 * 128 + part * 32 + word % 16 * 2
        at = row * (K // GROUP) + k // GROUP
        s = tl.load(scale + at, mask=k < K, other=0.0).to(tl.float32)
        z = tl.load(zero + at, mask=k < K, other=0).to(tl.float32) if ZEROS else 8.0
        first = (((w >> (4 * part)) & 15).to(tl.float32) - z) * s
        second = (((w >> (16 + 4 * part)) & 15).to(tl.float32) - z) * s
        both = tl.join(first, second).to(HALF)  # [WORDS, 2]
        where = row * K + k[:, None] + tl.arange(0, 2)[None, :]
        tl.store(out + where, both, mask=(k < K)[:, None] & (word < SPANS * 16)[:, None])


def unpack(weight: QuantizedWeight, size: int, dtype: torch.dtype) -> Tensor:
    """The weight `[N, K]` in a type that can be multiplied; four bits lie as `to_words` leaves them."""
    n = len(weight.data)
    out = torch.empty(n, size, dtype=dtype, device=weight.data.device)
    scheme = weight.scheme
    if scheme.weights == "int4":
        words = weight.data.shape[1]
        unpack4_kernel[(n, triton.cdiv(words, 256))](
            out, weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero,
            K=size, GROUP=scheme.group, ZEROS=weight.zero is not None, WORDS=256, HALF=TYPES[dtype],
            num_warps=4,
        )  # fmt: skip
    else:
        block = min(4096, triton.next_power_of_2(size))
        unpack8_kernel[(n, triton.cdiv(size, block))](
            out, weight.data, weight.scale, weight.scale.stride(0),
            K=size, SIDE=BLOCK if scheme.scales == "block" else 0, BLOCK_K=block, HALF=TYPES[dtype],
            num_warps=4,
        )  # fmt: skip
    return out
