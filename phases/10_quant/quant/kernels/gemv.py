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

from cuda_graphs.latency.tables import GemvConfig
from quant.formats import BLOCK, LARGEST
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
def gemv8_kernel(
    out, x, weight, weight_scale, norm_weight, bias, residual, eps, N, scale_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr, NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    ROUND: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr, HARDWARE: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs. SIDE: of blocks that share a scale; 0: a row does.

    TRIGGER: see `cuda_graphs.latency.gemv`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    mask = (row < N)[:, None] & (k < K)[None, :]
    up_at = at + N.to(tl.int64) * K
    w = tl.load(weight + at, mask=mask, other=0.0)
    up = tl.load(weight + up_at, mask=mask, other=0.0) if GATED else w
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    row_scale = tl.full([ROWS], 1.0, tl.float32)
    up_scale = row_scale
    if SIDE == 0:
        row_scale = tl.load(weight_scale + row, mask=row < N, other=0.0)
        if GATED:
            up_scale = tl.load(weight_scale + N + row, mask=row < N, other=0.0)
    if PDL:
        if TRIGGER == 0:
            gdc_launch_dependents()
        gdc_wait()
        if TRIGGER == 1:
            gdc_launch_dependents()
    if ADD:
        added += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    # The whole input at once, so that its loads wait together; and then its scales, once.
    parts = ()
    squares = tl.zeros([BLOCK_K], tl.float32)
    top = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        part = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += part * part
            g = tl.load(norm_weight + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            part = part * (g + 1.0 if ONE_PLUS else g)
        top = tl.maximum(top, tl.abs(part))
        parts += (part,)  # type: ignore[assignment]
    norm, largest = input_scales(squares, top, eps, K, NORM, ROUND)
    scale, inverse = 1.0, 1.0
    if ROUND:
        scale, inverse = token_scale(largest.to(x.dtype.element_ty).to(tl.float32), LARGEST)
    total = tl.zeros([ROWS], tl.float32)
    total_up = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = (row < N)[:, None] & (start + k < K)[None, :]
            w = tl.load(weight + at + start, mask=mask, other=0.0)
            if GATED:
                up = tl.load(weight + up_at + start, mask=mask, other=0.0)
        vector = parts[start // BLOCK_K]  # type: ignore[var-annotated]
        if NORM:
            vector = (vector * norm).to(x.dtype.element_ty).to(tl.float32)  # rounded as a norm apart
        if ROUND:
            vector = rounded(vector * inverse, LARGEST, WHOLE, HARDWARE)
        product = w.to(tl.float32) * vector[None, :]
        if SIDE == 0:
            total += tl.sum(product, axis=1)
        else:
            total += block_sum(product, weight_scale, row, start, scale_stride, N, K, ROWS, BLOCK_K, SIDE)
        if GATED:
            product = up.to(tl.float32) * vector[None, :]
            if SIDE == 0:
                total_up += tl.sum(product, axis=1)
            else:
                total_up += block_sum(
                    product, weight_scale, N + row, start, scale_stride, 2 * N, K, ROWS, BLOCK_K, SIDE
                )
    if PDL and TRIGGER == 2:
        gdc_launch_dependents()
    total = total * row_scale * scale
    if GATED:
        total = activate(total, KIND) * (total_up * up_scale * scale)
    tl.store(out + row, (total + added).to(out.dtype.element_ty), mask=row < N)


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


def gemv8_default(rows: int, size: int, gated: bool) -> GemvConfig:
    """About 32 KiB a program of 4 warps, at least 128 programs: each repeats what is done to the input."""
    block_k = min(4096, max(BLOCK, triton.next_power_of_2(size)))
    wanted = max(1, min(32_768 // (block_k * (2 if gated else 1)), rows // 128))
    warps = 8 if size <= 1024 and not gated and rows < 65_536 else 4
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, warps, late=size > block_k)


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
    config: GemvConfig | None = None,
) -> Tensor:
    """`cuda_graphs.latency.gemv` with a weight of eight bits, its scales by channel or block: `[..., N]`."""
    scheme = weight.scheme
    assert scheme.scales in ("channel", "block") and weight.order is None, "not a form that this kernel reads"
    whole, size = weight.shape
    rows = whole // (1 if gate is None else 2)
    shape = config or gemv8_default(rows, size, gate is not None)
    out = torch.empty(*x.shape[:-1], rows, dtype=out_dtype or x.dtype, device=x.device)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    early = dependent_launch(x.device)
    blocks = scheme.scales == "block"
    gemv8_kernel[(triton.cdiv(rows, shape.rows),)](
        out, x, weight.data, weight.scale, norm_weight, x if bias is None else bias,
        x if residual is None else residual, eps, rows, weight.scale.stride(0),
        K=size, ROWS=shape.rows, BLOCK_K=shape.block_k, SIDE=BLOCK if blocks else 0, NORM=norm is not None,
        ONE_PLUS=one_plus, BIAS=bias is not None, ADD=residual is not None, GATED=gate is not None,
        KIND=0 if gate is None else KINDS[gate], ROUND=scheme.activations is not None,
        LARGEST=LARGEST[scheme.activations or "fp8"], WHOLE=scheme.activations == "int8",
        HARDWARE=hardware_rounds(x.device), PDL=early,
        TRIGGER=2 if shape.late else (0 if run_ahead else 1),
        num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
