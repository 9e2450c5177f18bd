"""Matrix times vector for a batch of one token, the matrix in eight bits.

`cuda_graphs.latency.gemv` with half the bytes: numbers become float32 in registers, where nobody waits for
them, and a row's scale is multiplied once, when its sum is known. Where the scheme rounds a layer's inputs,
this does so, too, though it gains nothing by it: a request gets the same tokens alone and among others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quant.formats import BLOCK, LARGEST
from quant.kernels.configs import StepsConfig, steps_config
from quant.kernels.inputs import hardware_rounds, rounded, token_scale
from quant.weights import QuantizedWeight
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.activation import KINDS, activate
from triton_paged_attention.kernels.norms import NormWeights


@triton.jit
def sum_and_top(square_a, top_a, square_b, top_b):
    """Two reductions in one: a sum, and a maximum."""
    return square_a + square_b, tl.maximum(top_a, top_b)


@triton.jit
def input_scales(squares, top, eps, K: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr):
    """What a norm multiplies its input by, and the largest magnitude behind it.

    squares, top: of the input, and of the input times the norm's weight, still `[n]`. Programs repeat this,
    and every reduction is a wait: so there is one.
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
def place_of(
    first_row, N, tile: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    MATRICES: tl.constexpr,
):  # fmt: skip
    """Rows and first input of a program's tile: of all matrices, then of all inputs, then of further rows."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = first_row + tile // (MATRICES * PARTS) * ROWS + tl.arange(0, ROWS)
    # Behind the last row of the first matrix lies the second: such rows are nobody's.
    row = tl.where(row < N, row + tile % MATRICES * N, MATRICES * N)
    return row, tile // MATRICES % PARTS * BLOCK_K


@triton.jit
def load_addends(
    bias, residual, first_row, N, ROWS: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """What is added to a program's outputs, `[ROWS]` a step."""
    added = ()
    for step in tl.static_range(STEPS):
        row = first_row + step * ROWS + tl.arange(0, ROWS)
        more = tl.zeros([ROWS], tl.float32)
        if BIAS:
            more += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
        if ADD:
            more += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
        added += (more,)  # type: ignore[assignment]
    return added


@triton.jit
def load_tile(
    weight, weight_scale, first_row, k, N, tile: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, MATRICES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A program's next weights `[ROWS, BLOCK_K]`, and the scales of their rows if rows have some."""
    row, start = place_of(first_row, N, tile, K, ROWS, BLOCK_K, MATRICES)
    real = row < N * MATRICES
    at = row.to(tl.int64)[:, None] * K + start + k[None, :]
    w = tl.load(weight + at, mask=real[:, None] & (start + k < K)[None, :], other=0.0)
    s = tl.full([ROWS], 1.0, tl.float32)
    if SIDE == 0:
        s = tl.load(weight_scale + row, mask=real, other=0.0)
    return w, s


@triton.jit
def gemv8_kernel(
    out, x, weight, weight_scale, norm_weight, bias, residual, eps, N, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_K: tl.constexpr,
    SIDE: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ROUND: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One program per `STEPS` times `ROWS` outputs, for which the input is prepared once.

    AHEAD: tiles that are loaded before the first is needed. SIDE: of blocks that share a scale; 0: a row
    does. TRIGGER: see `cuda_graphs.latency.gemv`.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = STEPS * PARTS * MATRICES
    first_row = tl.program_id(0) * (ROWS * STEPS)
    k = tl.arange(0, BLOCK_K)
    weights, scales = (), ()
    for tile in tl.static_range(AHEAD if AHEAD < TILES else TILES):
        w, s = load_tile(weight, weight_scale, first_row, k, N, tile, K, ROWS, BLOCK_K, MATRICES, SIDE)
        weights += (w,)  # type: ignore[assignment]
        scales += (s,)  # type: ignore[assignment]
    if PDL:
        if TRIGGER == 0:
            gdc_launch_dependents()
        gdc_wait()
        if TRIGGER == 1:
            gdc_launch_dependents()
    added = load_addends(bias, residual, first_row, N, ROWS, STEPS, BIAS, ADD)
    # The whole input at once, so that its loads wait together; and then its scales, once.
    parts = ()
    squares = tl.zeros([BLOCK_K], tl.float32)
    top = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(PARTS):
        inside = i * BLOCK_K + k < K
        part = tl.load(x + i * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += part * part
            g = tl.load(norm_weight + i * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
            part = part * (g + 1.0 if ONE_PLUS else g)
        top = tl.maximum(top, tl.abs(part))
        parts += (part,)  # type: ignore[assignment]
    norm, largest = input_scales(squares, top, eps, K, NORM, ROUND)
    scale, inverse = 1.0, 1.0
    if ROUND:
        scale, inverse = token_scale(largest.to(x.dtype.element_ty).to(tl.float32), LARGEST)
    vectors = ()
    for i in tl.static_range(PARTS):
        vector = parts[i]  # type: ignore[var-annotated]
        if NORM:
            vector = (vector * norm).to(x.dtype.element_ty).to(tl.float32)  # rounded as a norm apart
        if ROUND:
            vector = rounded(vector * inverse, LARGEST, WHOLE, HARDWARE)
        vectors += (vector,)  # type: ignore[assignment]
    gates = tl.zeros([ROWS], tl.float32)
    ups = tl.zeros([ROWS], tl.float32)
    for tile in tl.static_range(TILES):
        if tile + AHEAD < TILES:
            w, s = load_tile(
                weight, weight_scale, first_row, k, N, tile + AHEAD, K, ROWS, BLOCK_K, MATRICES, SIDE
            )
            weights += (w,)  # type: ignore[assignment]
            scales += (s,)  # type: ignore[assignment]
        product = weights[tile].to(tl.float32) * vectors[tile // MATRICES % PARTS][None, :]  # type: ignore[var-annotated]
        if SIDE == 0:
            total = tl.sum(product, axis=1) * scales[tile]
        else:
            row, start = place_of(first_row, N, tile, K, ROWS, BLOCK_K, MATRICES)
            total = block_sum(
                product, weight_scale, row, start, scale_stride, N * MATRICES, K, ROWS, BLOCK_K, SIDE
            )
        if tile % MATRICES == 0:
            gates += total
        else:
            ups += total
        if tile % (PARTS * MATRICES) == PARTS * MATRICES - 1:  # these rows are complete
            if PDL and TRIGGER == 2 and tile == TILES - 1:
                gdc_launch_dependents()
            row = first_row + tile // (PARTS * MATRICES) * ROWS + tl.arange(0, ROWS)
            result = gates * scale
            if GATED:
                result = activate(result, KIND) * (ups * scale)
            result += added[tile // (PARTS * MATRICES)]
            tl.store(out + row, result.to(out.dtype.element_ty), mask=row < N)
            gates = tl.zeros([ROWS], tl.float32)
            ups = tl.zeros([ROWS], tl.float32)


@triton.jit
def block_sum(
    product, weight_scale, row, start, scale_stride, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Products `[ROWS, BLOCK_K]` from input `start` on, summed up block by block, each with its scale."""
    BLOCKS: tl.constexpr = BLOCK_K // SIDE
    sums = tl.sum(tl.reshape(product, [ROWS, BLOCKS, SIDE]), axis=2)
    block = start // SIDE + tl.arange(0, BLOCKS)
    at = (row // SIDE)[:, None] * scale_stride + block[None, :]
    inside = (row < N)[:, None] & (block * SIDE < K)[None, :]
    return tl.sum(sums * tl.load(weight_scale + at, mask=inside, other=0.0), axis=1)


def gemv8(
    x: Tensor,  # [..., K], one row
    weight: QuantizedWeight,  # [N, K], or [2 N, K] when gated; fp8 or int8
    *,
    norm: NormWeights | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
    run_ahead: bool = True,
    config: StepsConfig | None = None,
) -> Tensor:
    """`cuda_graphs.latency.gemv` with a weight of eight bits, its scales by channel or block: `[..., N]`."""
    scheme = weight.scheme
    assert scheme.scales in ("channel", "block") and weight.order is None, "not a form that this kernel reads"
    whole, size = weight.shape
    rows = whole // (1 if gate is None else 2)
    shape = config or steps_config(rows, size, whole // rows, 8, x.device)
    out = torch.empty(*x.shape[:-1], rows, dtype=out_dtype or x.dtype, device=x.device)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    early = dependent_launch(x.device)
    blocks = scheme.scales == "block"
    gemv8_kernel[(triton.cdiv(rows, shape.rows * shape.steps),)](
        out, x, weight.data, weight.scale, norm_weight, x if bias is None else bias,
        x if residual is None else residual, eps, rows, weight.scale.stride(0),
        K=size, ROWS=shape.rows, STEPS=shape.steps, AHEAD=shape.ahead, BLOCK_K=shape.block_k,
        SIDE=BLOCK if blocks else 0, NORM=norm is not None, ONE_PLUS=one_plus, BIAS=bias is not None,
        ADD=residual is not None, GATED=gate is not None,
        KIND=0 if gate is None else KINDS[gate], ROUND=scheme.activations is not None,
        LARGEST=LARGEST[scheme.activations or "fp8"], WHOLE=scheme.activations == "int8",
        HARDWARE=hardware_rounds(x.device), PDL=early,
        TRIGGER=2 if shape.late else (0 if run_ahead else 1),
        num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
