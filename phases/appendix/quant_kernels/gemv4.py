"""Matrix times vector for a batch of one token, the matrix in four bits.

A quarter of the bytes leaves so little time that unpacking a number must cost less than reading it. So the
nibbles lie where tensor registers want them: one word has four pairs of inputs, and a mask alone turns a pair
of nibbles into a pair of float16 numbers. A float16 with `n` in its last bits and nothing else is n times
2^-24, small, but a number that multiplies like any other; four bits further up it is 16 n times 2^-24. So
inputs are made as large as float16 allows, and those multiplied with the higher nibbles a sixteenth of it.
Sixteen products are summed up in float16; then the zero point's contribution is taken off, and the group's
scale multiplied, in float32.
"""

from __future__ import annotations

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from phases.appendix.latency.gemv import FusedOperators, add_vector, launch, wait_for_input
from phases.appendix.quant_kernels.configs import loop_config
from phases.appendix.quant_kernels.gemv import (
    float16_pair,
    input_scales,
    power_scale,
    split_four,
    tile_origin,
)
from quant.products import SPAN
from quant.weights import QuantizedWeight
from triton_paged_attention.linear import activate


def _products(word: int, total: str) -> str:
    """Return PTX that adds the eight products of one word of four-bit weights and its inputs to `total`.

    word: index, 0 to 3, of the int32 operand with the weights. total: name of a register with a pair of
        float16 sums.
    """
    x = [f"${5 + 4 * word + part}" for part in range(4)]
    first = (
        f"mul.f16x2 {total}, a, {x[0]}"
        if word % 2 == 0
        else f"fma.rn.f16x2 {total}, a, {x[0]}, {total}"
    )
    return f"""
shr.u32 t, ${word + 1}, 8;
and.b32 a, ${word + 1}, 0x000f000f; and.b32 b, ${word + 1}, 0x00f000f0;
and.b32 c, t, 0x000f000f; and.b32 d, t, 0x00f000f0;
{first}; fma.rn.f16x2 {total}, b, {x[1]}, {total};
fma.rn.f16x2 {total}, c, {x[2]}, {total}; fma.rn.f16x2 {total}, d, {x[3]}, {total};"""


FOUR_WORDS = tl.constexpr(
    "{.reg .b32 t, a, b, c, d, p, q; .reg .b16 x, y; .reg .f32 f, g;"
    + _products(0, "p") + _products(1, "p") + _products(2, "q") + _products(3, "q")
    + "add.f16x2 p, p, q; mov.b32 {x, y}, p; cvt.f32.f16 f, x; cvt.f32.f16 g, y; add.f32 $0, f, g; }"
)  # fmt: skip
"""Products of four words, nibbles times 2^-24, with sixteen pairs of float16 numbers, summed up."""
LARGE = tl.constexpr(2.0**14)
"""By what inputs below 2 are multiplied first: products of 15 and the sum of eight are float16, too."""
UNIT = tl.constexpr(2.0**10)
"""What is left of 2^24."""
OPERANDS = tl.constexpr("=r" + ",r" * 20)


@triton.jit
def load_rows(
    weight, scale, zero, first_row, q, N, K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, MATRICES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Load all four-bit weights of `ROWS` outputs: return tuples of tiles, of scales and of zero points.

    weight: int32 words `[N, 16 ceil(K / 128)]` of `products.to_words`, for each of MATRICES matrices. A tile
        is `[ROWS, Q, 4]` words of eight numbers; q: `arange(Q)`, Q = BLOCK_K / 32.
    scale, zero: `[N, K / GROUP]`, loaded `[ROWS, Q]` for each tile with ASM; otherwise the tuples are empty.
    first_row: the program's first output. N: outputs of a matrix. zero: None: there are no zero points.
    """
    SPANS: tl.constexpr = (K + 127) // 128
    words = ()
    scales = ()
    zeros = ()
    for tile in tl.static_range((K + BLOCK_K - 1) // BLOCK_K * MATRICES):
        row, start = tile_origin(first_row, N, tile, ROWS, BLOCK_K, MATRICES)
        real = row < N * MATRICES
        word = start // 8 + q[:, None] * 4 + tl.arange(0, 4)[None, :]
        at = row.to(tl.int64)[:, None, None] * (SPANS * 16) + word[None, :, :]
        w = tl.load(
            weight + at, mask=real[:, None, None] & (word < SPANS * 16)[None, :, :], other=0
        )
        words += (w,)  # type: ignore[assignment]
        if ASM:
            s = load_group(scale, row, real, start + q * 32, 0.0, K, GROUP)
            scales += (s,)  # type: ignore[assignment]
            if zero is not None:
                zeros += (load_group(zero, row, real, start + q * 32, 8, K, GROUP),)  # type: ignore[assignment]
    return words, scales, zeros


@triton.jit
def load_group(numbers, row, real, k, other, K: tl.constexpr, GROUP: tl.constexpr):
    """Load the scales or zero points of rows `row [ROWS]` for the groups of inputs `k [Q]`: `[ROWS, Q]`.

    numbers: `[N, K / GROUP]`, the scales or zero points. real: `[ROWS]`, which rows exist. other: what is
        returned for rows that do not exist and inputs from K on.
    """
    at = row.to(tl.int64)[:, None] * (K // GROUP) + (k // GROUP)[None, :]
    return tl.load(numbers + at, mask=real[:, None] & (k < K)[None, :], other=other)


@triton.jit
def load_inputs(x, start, q, part: tl.constexpr, K: tl.constexpr):
    """Load eight neighbouring inputs for each word in `q`, split in even and odd: `[Q, 4]` float32 each.

    These are the inputs that one quarter of the word's nibbles is multiplied with.

    x: `[K]`. start: the tile's first input. q: `[Q]`, numbers of words. part: 0 to 3, which quarter; each
        lies 32 inputs after the one before.
    """
    at = (start + q // 4 * 128 + q % 4 * 8)[:, None] + part * 32 + tl.arange(0, 8)[None, :]
    eight = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)  # as they lie: one load
    return tl.split(tl.reshape(eight, [q.shape[0], 4, 2]))


@triton.jit
def gemv4_kernel(
    out, x, weight, scale, zero, norm_weight, bias, residual, eps, N,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Compute a four-bit matrix times a vector, with norm, bias, residual and gate around the product.

    As many programs as run at once; each prepares the input once, and loops over tiles of `ROWS` outputs.
    out, bias, residual: `[N]`. x: `[K]`. norm_weight, eps: `[K]` weights of the input's RMSNorm, and its
        epsilon. weight: int32 words `[N, 16 ceil(K / 128)]` of `products.to_words`; with GATED the gate's
        rows above the up projection's.
    scale, zero: `[N, K / GROUP]`, of each group of GROUP inputs; zero None: every zero point is 8. KIND:
        number of the gate's activation (`linear.KINDS`).
    norm_weight, bias, residual: None leaves out that step. ASM: multiply pairs of float16 by PTX.
    BLOCK_K: inputs of a tile.
    TRIGGER, PDL: see `latency.gemv.wait_for_input`.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first_row = tl.program_id(0) * ROWS
    q = tl.arange(0, BLOCK_K // 32)
    words, scales, zeros = load_rows(
        weight, scale, zero, first_row, q, N, K, GROUP, ROWS, BLOCK_K, MATRICES, ASM
    )
    wait_for_input(TRIGGER, PDL)
    # The whole input at once, in the order of the words: four parts of four pairs for each of their quarters.
    even, odd = (), ()
    squares = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    top = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    for i in tl.static_range(4 * PARTS):
        low, high = load_inputs(x, i // 4 * BLOCK_K, q, i % 4, K)
        if norm_weight is not None:
            squares += low * low + high * high
            g, h = load_inputs(norm_weight, i // 4 * BLOCK_K, q, i % 4, K)
            low, high = low * g, high * h
        top = tl.maximum(top, tl.maximum(tl.abs(low), tl.abs(high)))
        even += (low,)  # type: ignore[assignment]
        odd += (high,)  # type: ignore[assignment]
    norm, largest = input_scales(
        tl.reshape(squares, [BLOCK_K // 8]),
        tl.reshape(top, [BLOCK_K // 8]),
        eps,
        K,
        norm_weight is not None,
        True,
    )
    scale_x, inverse = power_scale(largest)
    lows = ()
    highs = ()
    pairs = ()
    inputs = ()
    for i in tl.static_range(4 * PARTS):
        # Rounded as a norm apart.
        low = (even[i] * norm).to(x.dtype.element_ty).to(tl.float32) * inverse
        high = (odd[i] * norm).to(x.dtype.element_ty).to(tl.float32) * inverse
        lows += (low,)  # type: ignore[assignment]
        highs += (high,)  # type: ignore[assignment]
        large = LARGE / 16 if i % 2 == 1 else LARGE
        pairs += (float16_pair(low * large, high * large),)  # type: ignore[assignment]
    for i in tl.static_range(PARTS):
        every = lows[4 * i] + highs[4 * i]  # type: ignore[var-annotated]
        for part in tl.static_range(1, 4):
            every += lows[4 * i + part] + highs[4 * i + part]
        inputs += (tl.sum(every, axis=1),)  # type: ignore[assignment]
    step = tl.num_programs(0) * ROWS
    for here in tl.range(first_row, N, step):
        row = here + tl.arange(0, ROWS)
        added = add_vector(tl.zeros([ROWS], tl.float32), bias, row, N)
        added = add_vector(added, residual, row, N)
        later, later_scales, later_zeros = load_rows(
            weight,
            scale,
            zero,
            here + step,
            q,
            N,
            K,
            GROUP,
            ROWS,
            BLOCK_K,
            MATRICES,
            ASM,
        )
        result = tl.zeros([ROWS], tl.float32)
        up = tl.zeros([ROWS], tl.float32)
        for matrix in tl.static_range(MATRICES):
            product = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
            for i in tl.static_range(PARTS):
                tile_words = words[i * MATRICES + matrix]  # [ROWS, Q, 4], eight nibbles each
                if ASM:
                    w0, w1, w2, w3 = split_four(tile_words)
                    a0, a1, a2, a3 = split_four(pairs[4 * i][None, :, :])
                    b0, b1, b2, b3 = split_four(pairs[4 * i + 1][None, :, :])
                    c0, c1, c2, c3 = split_four(pairs[4 * i + 2][None, :, :])
                    d0, d1, d2, d3 = split_four(pairs[4 * i + 3][None, :, :])
                    total = tl.inline_asm_elementwise(
                        FOUR_WORDS, OPERANDS,
                        [w0, w1, w2, w3, a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3],
                        dtype=tl.float32, is_pure=True, pack=1,
                    )  # fmt: skip
                    zero_point = 8.0
                    if zero is not None:
                        zero_point = zeros[i * MATRICES + matrix].to(tl.float32)
                    total = total * UNIT - zero_point * inputs[i][None, :]
                    total *= scales[i * MATRICES + matrix].to(tl.float32)
                else:
                    total = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
                    tile_row, start = tile_origin(
                        here, N, i * MATRICES + matrix, ROWS, BLOCK_K, MATRICES
                    )
                    real = tile_row < N * MATRICES
                    for part in tl.static_range(4):
                        low, high = lows[4 * i + part], highs[4 * i + part]
                        first = ((tile_words >> (4 * part)) & 15).to(tl.float32) - 8.0
                        second = ((tile_words >> (16 + 4 * part)) & 15).to(tl.float32) - 8.0
                        some = tl.sum(
                            first * low[None, :, :] + second * high[None, :, :], axis=2
                        )
                        k = start + q // 4 * 128 + part * 32
                        if zero is not None:
                            off = load_group(zero, tile_row, real, k, 8, K, GROUP)
                            off = 8.0 - off.to(tl.float32)
                            some += off * tl.sum(low + high, axis=1)[None, :]
                        s = load_group(scale, tile_row, real, k, 0.0, K, GROUP)
                        total += some * s.to(tl.float32)
                product += total
            if matrix == 0:
                result = tl.sum(product, axis=1) * scale_x
            else:
                up = tl.sum(product, axis=1) * scale_x
        if GATED:
            result = activate(result, KIND) * up
        tl.store(out + row, (result + added).to(out.dtype.element_ty), mask=row < N)
        words = later
        scales = later_scales
        zeros = later_zeros


def gemv4(
    x: Tensor,  # [..., K], one row
    weight: QuantizedWeight,  # [N, K], or [2 N, K] when gated; its `data` is that of `to_words`
    size: int,
    **operators: Unpack[FusedOperators],
) -> Tensor:
    """Multiply a four-bit matrix with one vector, and compute the operators around the product.

    Args:
        x: `[..., size]`, one row.
        weight: `[N, size]`, or `[2 N, size]` with a gate: the gate's rows above the up projection's. Its
            numbers lie in the int32 words of `products.to_words`.
        size: inputs of the weight, which do not follow from the words, since these are padded.
        operators: keys of `FusedOperators`: norm, bias, residual, gate, out_dtype, trigger_early.

    Returns:
        `[..., N]`.
    """
    matrices, group = 1 if operators.get("gate") is None else 2, weight.scheme.group
    rows = len(weight.data) // matrices
    shape = loop_config(rows, size, matrices, 4, x.device)

    return launch(
        gemv4_kernel, shape.programs(rows, x.device), x, [weight.data, weight.scale, weight.zero],
        rows, operators,
        K=size, GROUP=group, ROWS=shape.rows, BLOCK_K=shape.block_k,
        ASM=x.is_cuda and group % SPAN == 0, num_warps=shape.num_warps,
    )  # fmt: skip
