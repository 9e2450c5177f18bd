"""`latency.heads` with a weight of eight bits: splits of attention meet in the projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phases.appendix.latency.heads import combine_heads
from phases.appendix.latency.lone import LoneParts, splits_of
from phases.appendix.latency.tables import HeadsConfig
from quant.formats import LARGEST
from quant.kernels.products import hardware_rounds, rounded, token_scale
from quant.weights import QuantizedWeight
from triton_paged_attention.hardware import dependent_launch


@triton.jit
def heads8_kernel(
    out, partial, lse, context_len, weight, weight_scale, bias, residual, N,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, ROUND: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs; see `heads_kernel`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, H_PAD * D_PAD)
    column = k // D_PAD * D + k % D_PAD
    inside = (k // D_PAD < H) & (k % D_PAD < D)
    w = tl.load(
        weight + row.to(tl.int64)[:, None] * (H * D) + column[None, :],
        mask=(row < N)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    scales = tl.load(weight_scale + row, mask=row < N, other=0.0)
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    _, _, used = splits_of(tl.load(context_len), WINDOW, BLOCK_N, SPLITS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    added += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    vector = combine_heads(partial, lse, used, H, H_PAD, D, D_PAD, CHUNK)
    vector = tl.reshape(vector.to(out.dtype.element_ty), [H_PAD * D_PAD]).to(tl.float32)
    if ROUND:
        # Padding of heads may hold anything that is finite: it may not count as the largest.
        scale, inverse = token_scale(tl.max(tl.where(inside, tl.abs(vector), 0.0), axis=0), LARGEST)
        vector = rounded(vector * inverse, LARGEST, WHOLE, HARDWARE)
        scales = scales * scale
    product = tl.sum(w.to(tl.float32) * vector[None, :], axis=1) * scales
    tl.store(out + row, (product + added).to(out.dtype.element_ty), mask=row < N)


def project_heads8(
    residual: Tensor,  # [1, N]
    weight: QuantizedWeight,  # [N, H D], scales by channel
    bias: Tensor | None,  # [N]
    parts: LoneParts,
    *,
    shape: HeadsConfig,
) -> Tensor:
    """`latency.heads.project_heads` with a weight of eight bits: `[1, N]`."""
    layer, workspace, config = parts.layer, parts.workspace, parts.config
    heads, d, rows = layer.num_heads, layer.head_dim, len(weight.data)
    out = torch.empty_like(residual)
    assert workspace.rows >= config.splits * heads * 2, f"the workspace has {workspace.rows} rows only"
    early, kind = dependent_launch(residual.device), weight.scheme.activations
    heads8_kernel[(triton.cdiv(rows, shape.rows),)](
        out, workspace.partial.view(residual.dtype), workspace.lse, parts.context_lens, weight.data,
        weight.scale, residual if bias is None else bias, residual, rows,
        H=heads, H_PAD=triton.next_power_of_2(heads), D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        WINDOW=layer.sliding_window or 0, BLOCK_N=config.block_n, SPLITS=config.splits,
        CHUNK=min(shape.chunk, config.splits), ROWS=shape.rows, BIAS=bias is not None, ROUND=kind is not None,
        LARGEST=LARGEST[kind or "fp8"], WHOLE=kind == "int8", HARDWARE=hardware_rounds(residual.device),
        PDL=early, num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
