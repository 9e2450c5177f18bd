"""The output projection of a single request's token, which combines attention's splits in its kernel.

A split is the part of attention's output that one program has computed over some of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phases.appendix.latency.gemv import add_vector, wait_for_input
from phases.appendix.latency.single_request import LOG_STEP, SingleRequestSplits, splits_of
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.tiles import padded


@triton.jit
def combine_heads(
    partial, lse, used,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return attention's output `[H_PAD, D_PAD / 8, 8]` float32, combined from its first `used` splits.

    A split is attention over some of the keys.

    partial: `[splits, H, D_PAD]`, outputs of the splits.
    lse: `[splits, H]`, numbers `LOG_STEP` apart: log2 of each split's sum of softmax weights.
    CHUNK: splits that are loaded at a time. `_PAD`: rounded up to a power of two.
    """
    # Heads as [D / 8, H, 8], where a thread owns the last axis, and their weights as [D / 8, H]: each thread
    # loads what it needs of both, and nothing has to pass between threads.
    e = tl.arange(0, D_PAD // 8)[:, None]
    h = tl.arange(0, H_PAD)[None, :]
    lane = tl.arange(0, 8)[None, None, :]
    present = (h < H) & (e >= 0)
    # No kernel has written a head's padding, and 0 times what it holds may be NaN.
    inside = (
        present[:, :, None]
        if D == D_PAD
        else present[:, :, None] & (e[:, :, None] * 8 + lane < D)
    )
    at_part = (h * D_PAD + e * 8)[:, :, None] + lane
    at_log = h * LOG_STEP + e * 0
    top = tl.full([D_PAD // 8, H_PAD], -1.0e30, tl.float32)
    total = tl.zeros([D_PAD // 8, H_PAD], tl.float32)
    x = tl.zeros([D_PAD // 8, H_PAD, 8], tl.float32)
    for first in range(0, used, CHUNK):
        logs, parts = (), ()  # all loads of a chunk before the first use: they wait together
        for i in tl.static_range(CHUNK):
            here = partial + (first + i) * (H * D_PAD) + at_part
            written = tl.where(first + i < used, inside, False)
            parts += (tl.load(here, mask=written, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(CHUNK):
            here = lse + (first + i) * (H * LOG_STEP) + at_log
            written = tl.where(first + i < used, present, False)
            logs += (tl.load(here, mask=written, other=-1.0e30),)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(CHUNK):
            new_top = tl.maximum(new_top, logs[i])
        shrink = tl.exp2(top - new_top)
        total = total * shrink
        x = x * shrink[:, :, None]
        top = new_top
        for i in tl.static_range(CHUNK):
            portion = tl.exp2(logs[i] - top)  # 0 where there is no such split
            total += portion
            x += parts[i].to(tl.float32) * portion[:, :, None]
    return tl.permute(x / total[:, :, None], (1, 0, 2))


@triton.jit
def heads_kernel(
    out, partial, lse, context_len, weight, weight_scale, bias, residual, N,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    WHOLE: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine attention's splits, and multiply by the output projection. One program per `ROWS` outputs.

    A split is attention over some of the keys; every program combines those of all heads.

    out, bias, residual: `[N]`. weight: `[N, H D]`. weight_scale: `[N]`. bias, weight_scale: None: none.
    partial, lse: the splits' outputs `[splits, H, D_PAD]`, and log2 of their sums of softmax weights.
    context_len: `[1]`, from which follows the number of splits. SPLITS, BLOCK_N, WINDOW: those of attention's
        launch.
    ROUND: device function that rounds attention's output to eight bits; None: none. WHOLE: to integers, not
        e4m3. HARDWARE: the GPU has an instruction for e4m3. H, D: query heads, and numbers of a head.
    PDL: programmatic dependent launch is on. `_PAD`: rounded up to a power of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, H_PAD * D_PAD)
    column = k // D_PAD * D + k % D_PAD
    inside = (k // D_PAD < H) & (k % D_PAD < D)
    w = tl.load(
        weight + row.to(tl.int64)[:, None] * (H * D) + column[None, :],
        mask=(row < N)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    scales = 1.0
    if weight_scale is not None:
        scales = tl.load(weight_scale + row, mask=row < N, other=0.0)
    added = add_vector(tl.zeros([ROWS], tl.float32), bias, row, N)
    context = tl.load(context_len)
    _, _, used = splits_of(context - 1, context, WINDOW, BLOCK_N, SPLITS)
    wait_for_input(0, PDL)
    added = add_vector(added, residual, row, N)

    x = combine_heads(partial, lse, used, H, H_PAD, D, D_PAD, CHUNK)
    # Rounded as a step apart.
    vector = tl.reshape(x.to(out.dtype.element_ty), [H_PAD * D_PAD]).to(tl.float32)
    if ROUND is not None:
        vector, scale = ROUND(vector, inside, WHOLE, HARDWARE)
        scales = scales * scale
    product = tl.sum(w.to(tl.float32) * vector[None, :], axis=1) * scales
    tl.store(out + row, (product + added).to(out.dtype.element_ty), mask=row < N)


def project_heads(
    residual: Tensor,  # [1, N]
    weight: Tensor,  # [N, H D]
    bias: Tensor | None,  # [N]
    parts: SingleRequestSplits,
    *,
    rows: int = 8,  # of the weight in a program
    chunk: int = 10,  # splits loaded at once
    scale: Tensor | None = None,  # [N] float32, of each row
    rounding: tuple[Any, bool, bool] = (None, False, False),
) -> Tensor:
    """Return `residual + bias + weight @ (attention's output)`, `[1, N]`, from attention's splits.

    residual: `[1, N]`. weight: `[N, H D]`. bias: `[N]`, or None. scale: of each row of a quantized weight,
        `[N]` float32; None: none.
    parts: what `attend_step` returned; the splits (attention over some keys each) are still in its workspace.
    rows: outputs of a program. chunk: splits that are combined at a time.
    rounding: of attention's output before the product: (device function, whether the format has integers,
        whether the GPU has a conversion instruction). The function None: no rounding. The function gets the
        vector, which of its numbers are no padding, and the two constants; it returns the rounded vector and
        a factor for the product.
    """
    layer = parts.layer
    workspace = parts.workspace
    config = parts.config
    heads = layer.num_heads
    d = layer.head_dim
    size = weight.shape[0]
    out = torch.empty_like(residual)
    assert workspace.rows >= config.splits * heads * 2, (
        f"the workspace has {workspace.rows} rows only"
    )
    function, whole, hardware = rounding
    heads_kernel[(triton.cdiv(size, rows),)](
        out, workspace.partial.view(residual.dtype), workspace.lse, parts.context_lens, weight,
        scale, bias, residual, size,
        H=heads, H_PAD=triton.next_power_of_2(heads), D=d,
        D_PAD=padded(d),
        WINDOW=layer.sliding_window or 0, BLOCK_N=config.block_n, SPLITS=config.splits,
        CHUNK=min(chunk, config.splits), ROWS=rows, ROUND=function, WHOLE=whole,
        HARDWARE=hardware,
        num_warps=8, **dependent_launch(residual.device),
    )  # fmt: skip
    return out
