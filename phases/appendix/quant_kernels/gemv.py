"""Matrix times vector for a batch of one token, the matrix in eight bits.

This is `latency.gemv` with half the bytes, which leaves half the time for everything else. In that kernel
every program prepares the input for its rows; here a program prepares the input once and then loops over
tiles of rows. Numbers of e4m3 become pairs of float16 by one instruction, and sixteen products are summed up
in float16 before anything is float32: that is a third of the instructions of a float32 for each weight. A
row's scale is multiplied once, when its sum is known. Where the scheme rounds a layer's inputs, this kernel
rounds them, too, though it gains nothing by it: a request gets the same tokens alone and in a batch.
"""

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from phases.appendix.latency.gemv import FusedOperators, add_vector, launch, wait_for_input
from phases.appendix.quant_kernels.configs import loop_config
from quant.formats import BLOCK
from quant.products import hardware_rounds, rounded, token_scale
from quant.weights import QuantizedWeight
from triton_paged_attention.linear import activate


@triton.jit
def sum_and_top(square_a, top_a, square_b, top_b):
    """Return (square_a + square_b, max(top_a, top_b)), to reduce a sum and a maximum in one `tl.reduce`."""
    return square_a + square_b, tl.maximum(top_a, top_b)


@triton.jit
def input_scales(squares, top, eps, K: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr):
    """Return a norm's factor for its input, and the largest magnitude of the normalized input.

    squares, top: `[n]`, partial sums of the input's squares, and partial maxima of the input's magnitudes
        times the norm's weight. K: number of inputs. eps: of the norm. NORM: there is a norm, otherwise the
        factor is 1. ROUND: the magnitude is needed, otherwise the second result has no meaning. Both
        results come from one reduction, since every reduction is a wait.
    """
    norm = 1.0
    if NORM and ROUND:
        squares, top = tl.reduce((squares, top), 0, sum_and_top)
        norm = tl.rsqrt(squares / K + eps)
    elif NORM:
        norm = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    elif ROUND:
        top = tl.max(top, axis=0)
    return norm, top * norm


@triton.jit
def power_scale(top):
    """Return the largest power of two that is not above `top`, and its inverse, float32 each.

    top: a float32 of at least 0; below 2^-126, 0 included, the results are 2^-126 and 2^126.

    To divide by a power of two rounds nothing.
    """
    bits = tl.maximum(top, 1.1754943508222875e-38).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def float16_pair(low, high):
    """Return int32 words, each with two numbers as float16: `low` in the lower half, `high` in the upper."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def split_four(x):
    """Return the four tensors `[A, B]` that the last axis of `x [A, B, 4]` holds."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def tile_origin(
    first_row, N, tile: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MATRICES: tl.constexpr,
):  # fmt: skip
    """Return the rows `[ROWS]` and the first input of a program's tile number `tile`.

    Tiles take the matrices in turn (gate, up), then advance by BLOCK_K inputs.

    first_row: the program's first output. N: outputs of a matrix; a row past the last becomes MATRICES * N,
        which the caller does not read.
    """
    row = first_row + tl.arange(0, ROWS)
    # Behind the last row of the first matrix lies the second: no program owns such rows.
    row = tl.where(row < N, row + tile % MATRICES * N, MATRICES * N)
    return row, tile // MATRICES * BLOCK_K


@triton.jit
def load_rows(
    weight, weight_scale, first_row, q, N, scale_stride, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, MATRICES: tl.constexpr, SIDE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load all weights of `ROWS` outputs: return a tuple of tiles, and a tuple of their scales.

    A tile is `[ROWS, Q, 16]` numbers, or with WORDS `[ROWS, Q, 4]` int32 of four each.
    Tiles take the matrices in turn (gate, up), then advance by BLOCK_K inputs.
    weight: `[N, K]` for each of MATRICES matrices. first_row: the first output. q: `arange(Q)`, Q = BLOCK_K /
        16.
    weight_scale: `[N]`, loaded `[ROWS]` for each matrix; or with SIDE > 0 one for each block of SIDE x SIDE
        weights, rows `scale_stride` apart, loaded `[ROWS, Q]` for each tile.
    """
    EACH: tl.constexpr = 16 if WORDS == "" else 4
    weights, scales = (), ()
    for tile in tl.static_range((K + BLOCK_K - 1) // BLOCK_K * MATRICES):
        row, start = tile_origin(first_row, N, tile, ROWS, BLOCK_K, MATRICES)
        real = row < N * MATRICES
        k = start * EACH // 16 + q[:, None] * EACH + tl.arange(0, EACH)[None, :]
        at = row.to(tl.int64)[:, None, None] * (K * EACH // 16) + k[None, :, :]
        inside = real[:, None, None] & (k < K * EACH // 16)[None, :, :]
        w = tl.load(weight + at, mask=inside, other=0.0 if WORDS == "" else 0)
        weights += (w,)  # type: ignore[assignment]
        if SIDE > 0:
            block = (start + q * 16) // SIDE
            at = (row // SIDE)[:, None] * scale_stride + block[None, :]
            s = tl.load(
                weight_scale + at,
                mask=real[:, None] & (start + q * 16 < K)[None, :],
                other=0.0,
            )
            scales += (s,)  # type: ignore[assignment]
        elif tile < MATRICES:
            scales += (tl.load(weight_scale + row, mask=real, other=0.0),)  # type: ignore[assignment]
    return weights, scales


PAIRS = {
    "fp8": "mov.b32 {{x, y}}, {word}; cvt.rn.f16x2.e4m3x2 a, x; cvt.rn.f16x2.e4m3x2 b, y;",
    # 0x64 above a byte n is 1024 + n in float16; with its sign turned, a number n is the byte n + 128.
    "int8": "xor.b32 t, {word}, 0x80808080;"
    "prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342;"
    "sub.f16x2 a, a, low; sub.f16x2 b, b, low;",
}
"""Instructions that make of a word of four numbers two pairs of float16, `a` and `b`."""


def _four_words(kind: str) -> str:
    """Return PTX that multiplies sixteen weights, in four words, with sixteen inputs and sums the products.

    kind: format of the weights, "fp8" or "int8".
    Operands: the float32 sum, which is the result; four int32 words of four weights each; each word's first
        pair of float16 inputs, in four words; then each word's second pair.
    """
    text = "{.reg .b32 t, low, a, b, p, q; .reg .b16 x, y; .reg .f32 f, g; mov.b32 low, 0x64806480;"
    for word, total in enumerate("ppqq"):
        first = f"{total}, a, ${5 + word}"
        text += PAIRS[kind].format(word=f"${word + 1}")
        text += f"mul.f16x2 {first};" if word % 2 == 0 else f"fma.rn.f16x2 {first}, {total};"
        text += f"fma.rn.f16x2 {total}, b, ${9 + word}, {total};"
    return (
        text
        + "add.f16x2 p, p, q; mov.b32 {x, y}, p; cvt.f32.f16 f, x; cvt.f32.f16 g, y; add.f32 $0, f, g;}"
    )


FP8_WORDS, INT8_WORDS = tl.constexpr(_four_words("fp8")), tl.constexpr(_four_words("int8"))
OPERANDS = tl.constexpr("=r" + ",r" * 12)


@triton.jit
def sum_sixteen_products(w, x, WORDS: tl.constexpr):
    """Multiply a tile of weights with its inputs `x [Q, 16]`, and sum each row's products: `[ROWS, Q]`.

    Each of the sums has sixteen products.

    w: `[ROWS, Q, 16]` numbers, or with WORDS ("fp8" or "int8") `[ROWS, Q, 4]` int32 of four numbers each.
    """
    if WORDS != "":
        w0, w1, w2, w3 = split_four(w)
        low, high = tl.split(tl.reshape(x, [x.shape[0], 8, 2]))
        even, odd = tl.split(tl.reshape(float16_pair(low, high), [1, x.shape[0], 4, 2]))
        a0, a1, a2, a3 = split_four(even)
        b0, b1, b2, b3 = split_four(odd)
        total = tl.inline_asm_elementwise(
            FP8_WORDS if WORDS == "fp8" else INT8_WORDS, OPERANDS,
            [w0, w1, w2, w3, a0, a1, a2, a3, b0, b1, b2, b3],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = tl.sum(w.to(tl.float32) * x[None, :, :], axis=2)
    return total


@triton.jit
def gemv8_kernel(
    out, x, weight, weight_scale, norm_weight, bias, residual, eps, N, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    ROUND: tl.constexpr, WHOLE: tl.constexpr, HARDWARE: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Compute an eight-bit matrix times a vector, with norm, bias, residual and gate around the product.

    As many programs as run at once; each prepares the input once, and loops over tiles of `ROWS` outputs. The
    next tile's weights are loaded while one is multiplied.
    out, bias, residual: `[N]`. x: `[K]`. norm_weight, eps: `[K]` weights of the input's RMSNorm, and its
        epsilon. weight: `[N, K]` of 8 bits, or `[2 N, K]` with GATED: the gate's rows above the up
        projection's.
    weight_scale: `[N]`, or with SIDE > 0 one for each block of SIDE x SIDE weights, rows `scale_stride`
        apart.
    WORDS: "fp8" or "int8" if `weight` has int32 words of four numbers, which instructions convert to float16;
        else "".
    BLOCK_K: inputs of a tile. ROUND: round the input to eight bits, integers if WHOLE. HARDWARE: the GPU
        has an instruction for e4m3. KIND: number of the gate's activation (`linear.KINDS`).
    norm_weight, bias, residual: None leaves out that step. TRIGGER, PDL: see `latency.gemv.wait_for_input`.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # 448 times 448 is no float16, and to divide by a power of two rounds nothing.
    SMALLER: tl.constexpr = 1.0 if WORDS == "" else 1.0 / 512
    q = tl.arange(0, BLOCK_K // 16)
    k = q[:, None] * 16 + tl.arange(0, 16)[None, :]
    first_row = tl.program_id(0) * ROWS
    weights, scales = load_rows(
        weight,
        weight_scale,
        first_row,
        q,
        N,
        scale_stride,
        K,
        ROWS,
        BLOCK_K,
        MATRICES,
        SIDE,
        WORDS,
    )
    wait_for_input(TRIGGER, PDL)
    # The whole input at once, so that its loads wait together; and then its scales, once.
    parts = ()
    squares = tl.zeros([BLOCK_K // 16, 16], tl.float32)
    top = tl.zeros([BLOCK_K // 16, 16], tl.float32)
    for i in tl.static_range(PARTS):
        inside = i * BLOCK_K + k < K
        part = tl.load(x + i * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += part * part
            g = tl.load(norm_weight + i * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
            part = part * g
        top = tl.maximum(top, tl.abs(part))
        parts += (part,)  # type: ignore[assignment]
    norm, largest = input_scales(
        tl.reshape(squares, [BLOCK_K]),
        tl.reshape(top, [BLOCK_K]),
        eps,
        K,
        norm_weight is not None,
        ROUND or WORDS != "",
    )
    scale, inverse = 1.0, 1.0
    if ROUND:
        scale, inverse = token_scale(largest.to(x.dtype.element_ty).to(tl.float32), WHOLE)
        scale = scale / SMALLER
    elif WORDS != "":
        scale, inverse = power_scale(largest)
    vectors = ()
    for i in tl.static_range(PARTS):
        vector = parts[i]  # type: ignore[var-annotated]
        if norm_weight is not None:
            # Rounded as a norm apart.
            vector = (vector * norm).to(x.dtype.element_ty).to(tl.float32)
        if ROUND:
            vector = rounded(vector * inverse, WHOLE, HARDWARE) * SMALLER
        elif WORDS != "":
            vector = vector * inverse  # type: ignore[assignment]
        vectors += (vector,)  # type: ignore[assignment]
    step = tl.num_programs(0) * ROWS
    for here in tl.range(first_row, N, step):
        row = here + tl.arange(0, ROWS)
        added = add_vector(tl.zeros([ROWS], tl.float32), bias, row, N)
        added = add_vector(added, residual, row, N)
        later, later_scales = load_rows(
            weight,
            weight_scale,
            here + step,
            q,
            N,
            scale_stride,
            K,
            ROWS,
            BLOCK_K,
            MATRICES,
            SIDE,
            WORDS,
        )
        result = tl.zeros([ROWS], tl.float32)
        up = tl.zeros([ROWS], tl.float32)
        for matrix in tl.static_range(MATRICES):
            product = tl.zeros([ROWS, BLOCK_K // 16], tl.float32)
            for i in tl.static_range(PARTS):
                sums = sum_sixteen_products(weights[i * MATRICES + matrix], vectors[i], WORDS)
                product += sums * scales[i * MATRICES + matrix] if SIDE > 0 else sums
            total = tl.sum(product, axis=1) * scale
            if SIDE == 0:
                total *= scales[matrix]
            if matrix == 0:
                result = total
            else:
                up = total
        if GATED:
            result = activate(result, KIND) * up
        tl.store(out + row, (result + added).to(out.dtype.element_ty), mask=row < N)
        weights, scales = later, later_scales


def gemv8(x: Tensor, weight: QuantizedWeight, **operators: Unpack[FusedOperators]) -> Tensor:
    """Multiply an eight-bit matrix with one vector, and compute the operators around the product.

    Args:
        x: `[..., K]`, one row.
        weight: `[N, K]`, or `[2 N, K]` with a gate: the gate's rows above the up projection's. It has scales
            by channel or by block.
        operators: keys of `FusedOperators`: norm, bias, residual, gate, out_dtype, trigger_early.

    Returns:
        `[..., N]`.
    """
    scheme = weight.scheme
    assert scheme.scales in ("channel", "block") and weight.order is None, (
        "not a form that this kernel reads"
    )
    matrices = 1 if operators.get("gate") is None else 2
    rows, size = weight.shape[0] // matrices, weight.shape[1]
    shape = loop_config(rows, size, matrices, 8, x.device)
    hardware = hardware_rounds(x.device)
    known = x.is_cuda and size % 16 == 0 and (scheme.weights == "int8" or hardware)
    data = weight.data.view(torch.int32) if known else weight.data
    return launch(
        gemv8_kernel, shape.programs(rows, x.device), x, [data, weight.scale], rows, operators,
        scale_stride=weight.scale.stride(0), K=size, ROWS=shape.rows, BLOCK_K=shape.block_k,
        SIDE=BLOCK if scheme.scales == "block" else 0, ROUND=scheme.activations is not None,
        WHOLE=scheme.activations == "int8",
        HARDWARE=hardware,
        WORDS=scheme.weights if known else "", num_warps=shape.num_warps,
    )  # fmt: skip
