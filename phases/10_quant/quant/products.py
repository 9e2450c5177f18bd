"""Products of many tokens: eight bits by eight bits where both are so, otherwise unpacked and multiplied.

A kernel rounds an input to eight bits. Four bits lie in words, in the order in which kernels read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quant.formats import BLOCK, DTYPES, LARGEST, Activations
from quant.weights import QuantizedWeight, unpack_nibbles
from triton_paged_attention.hardware import at_least

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TURING = (7, 5)
ADA = (8, 9)
"""Compute capabilities: Turing multiplies integers of eight bits, Ada numbers of e4m3."""
LEAST_ROWS = 32
"""What the library's product of whole numbers wants at least (it asks for more than 16)."""
_FP8, _INT8 = tl.constexpr(LARGEST["fp8"]), tl.constexpr(LARGEST["int8"])
"""The largest number of each format, as kernels read it."""


class Rounded(NamedTuple):
    """An input in eight bits: `values [T, K]`, each token to be multiplied by its `scale [T]` (float32)."""

    values: Tensor
    scale: Tensor


@triton.jit
def token_scale(top, WHOLE: tl.constexpr):
    """Return a token's scale (its largest magnitude over the format's largest number), and 1 / scale.

    top: the token's largest magnitude. WHOLE: the format is int8, otherwise e4m3. The scale is never 0.
    """
    scale = tl.maximum(top * (1.0 / (_INT8 if WHOLE else _FP8)), 1.1754943508222875e-38)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def rounded(y, WHOLE: tl.constexpr, HARDWARE: tl.constexpr):
    """Return float32 numbers `y` rounded to those that an eight-bit format has; they stay float32.

    WHOLE: the format is int8, otherwise e4m3, which has three bits of mantissa; below 2^-6 its numbers are
    multiples of 2^-9. HARDWARE: convert to e4m3 by the GPU's instruction; not every GPU has it, and in
    Triton's interpreter the conversion loses a carry. Without it: adding and subtracting 1.5 * 2^23 rounds
    to the nearest integer, ties to even.
    """
    if WHOLE:
        y = tl.minimum(tl.maximum(y, -_INT8), _INT8)
        y = (y + 12582912.0) - 12582912.0
    elif HARDWARE:
        y = y.to(tl.float8e4nv).to(tl.float32)  # the conversion itself clips at the largest
    else:
        y = tl.minimum(tl.maximum(y, -_FP8), _FP8)
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = ((y * 512.0 + 12582912.0) - 12582912.0) * 0.001953125
        y = tl.where(tl.abs(y) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return y


@triton.jit
def round_rows_kernel(
    out, out_scale, x,
    SIZE: tl.constexpr, WHOLE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Round one token's numbers to eight bits by the scale of its largest magnitude. One program per token.

    x: `[T, SIZE]`. out: `[T, SIZE]`, int8 or e4m3. out_scale: `[T]` float32.
    WHOLE: the format is int8. HARDWARE: the GPU converts to e4m3.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(SIZE))
    at, mask = token * SIZE + i, i < SIZE
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = token_scale(tl.max(tl.abs(y), axis=0), WHOLE)
    tl.store(out_scale + token, scale)
    y = rounded(y * inverse, WHOLE, HARDWARE)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


def hardware_rounds(device: torch.device) -> bool:
    """Return True if a device has an instruction that converts to e4m3 (Ada GPUs and later ones)."""
    return at_least(device, ADA)


def round_rows(x: Tensor, kind: Activations) -> Rounded:
    """Return `x [..., K]` rounded to eight bits: numbers `[T, K]`, and a scale for each of the `T` tokens.

    kind: "fp8" or "int8". A token's largest magnitude becomes the format's largest number.
    """
    x = x.contiguous()
    size = x.shape[-1]
    tokens = x.numel() // size
    out = torch.empty(tokens, size, dtype=DTYPES[kind], device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    if tokens:
        round_rows_kernel[(tokens,)](
            out, scale, x, SIZE=size, WHOLE=kind == "int8",
            HARDWARE=hardware_rounds(x.device), num_warps=min(16, max(1, padded // 512)),
        )  # fmt: skip
    return Rounded(out, scale)


SPAN = 128
"""Inputs that 16 words hold: bits 4 i and 16 + 4 i of word j are inputs 32 i + 2 j and 32 i + 2 j + 1."""


def to_words(weight: QuantizedWeight) -> Tensor:
    """Return a weight's four-bit numbers packed into the words that kernels read.

    weight: int4 `[N, K]`.

    Returns:
        int32 `[N, 16 ceil(K / 128)]`. Sixteen words hold 128 inputs: bits 4 i and 16 + 4 i of word j begin
        inputs 32 i + 2 j and 32 i + 2 j + 1. Beyond K the number is 8, which stands for 0.
    """
    numbers = unpack_nibbles(weight.data)  # [N, K]
    numbers = F.pad(numbers, (0, -numbers.shape[1] % SPAN), value=8)
    parts = numbers.view(len(numbers), -1, 4, 16, 2)  # spans, i, j, even and odd
    words = torch.zeros(
        parts.shape[0], parts.shape[1], 16, dtype=torch.int32, device=numbers.device
    )
    for i in range(4):
        for odd in range(2):
            words |= parts[:, :, i, :, odd].to(torch.int32) << (4 * i + 16 * odd)
    return words.flatten(1)


def eight_by_eight(x: Rounded, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return `x [T, K]` in eight bits times an eight-bit weight `[N, K]` with scales by channel: `[T, N]`.

    dtype: of the result.
    """
    if x.values.is_cuda and weight.data.dtype == torch.float8_e4m3fn:
        # Not float16, in which sums of such products overflow.
        return torch._scaled_mm(
            x.values, weight.data.t(), scale_a=x.scale[:, None], scale_b=weight.scale[None],
            out_dtype=torch.bfloat16, use_fast_accum=True,
        ).to(dtype)  # fmt: skip
    sums = multiply_numbers(x.values, weight.data)
    return (sums.float() * x.scale[:, None] * weight.scale).to(dtype)


def multiply_numbers(values: Tensor, data: Tensor) -> Tensor:
    """Return `values [T, K] @ data.T` for eight-bit `data [N, K]`, without scales: `[T, N]`.

    The result is int32 on a GPU, where both must be int8, and float32 on a CPU.
    """
    if not values.is_cuda:
        return F.linear(values.float(), data.float())
    tokens = len(values)
    if tokens < LEAST_ROWS:
        values = F.pad(values, (0, 0, 0, LEAST_ROWS - tokens))
    return torch._int_mm(values, data.t())[:tokens]


def eight_bits_are_faster(weight: QuantizedWeight, device: torch.device) -> bool:
    """Return True if the device can multiply eight-bit inputs by this weight without unpacking the weight.

    False if the weight's scheme does not round inputs, or scales are not by channel.
    """
    scheme = weight.scheme
    if scheme.activations is None or scheme.scales != "channel" or weight.order is not None:
        return False
    if device.type != "cuda":
        return True
    fits = all(size % 16 == 0 for size in weight.shape)
    return fits and at_least(device, ADA if scheme.weights == "fp8" else TURING)


@triton.jit
def unpack8_kernel(
    out, data, scale, scale_stride,
    K: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Dequantize an eight-bit weight. One program for each row and `BLOCK_K` of its inputs.

    out: `[N, K]` of dtype HALF. data: `[N, K]`, int8 or fp8. scale: `[N]` if SIDE is 0, otherwise one for
        each block of SIDE x SIDE weights, with `scale_stride` numbers from a row of blocks to the next.
    """
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
    out, words, scale, zero, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    WORDS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Dequantize a four-bit weight. One program for each row and `WORDS` of its words.

    out: `[N, K]` of dtype HALF: a number less its zero point, times its scale, in float32 until it is
        stored.
    words: int32 `[N, 16 ceil(K / 128)]`, eight numbers each, as `to_words` packs them.
    scale, zero: `[N, K / GROUP]`, for `GROUP` neighbouring inputs each; without ZEROS every zero point is
        8.
    """
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
    """Return the dequantized weight `[N, size]` in `dtype`, on a GPU.

    weight: in eight bits, or in four bits packed into int32 words (`to_words`). size: inputs of the layer,
        `K`.
    """
    n = len(weight.data)
    out = torch.empty(n, size, dtype=dtype, device=weight.data.device)
    scheme = weight.scheme
    if scheme.weights == "int4":
        words = weight.data.shape[1]
        unpack4_kernel[(n, triton.cdiv(words, 256))](
            out, weight.data, weight.scale,
            weight.zero,
            K=size, GROUP=scheme.group, ZEROS=weight.zero is not None, WORDS=256,
            HALF=TYPES[dtype],
            num_warps=4,
        )  # fmt: skip
    else:
        block = min(4096, triton.next_power_of_2(size))
        unpack8_kernel[(n, triton.cdiv(size, block))](
            out, weight.data, weight.scale, weight.scale.stride(0),
            K=size, SIDE=BLOCK if scheme.scales == "block" else 0, BLOCK_K=block,
            HALF=TYPES[dtype],
            num_warps=4,
        )  # fmt: skip
    return out
