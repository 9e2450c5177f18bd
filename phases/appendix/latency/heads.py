"""The output projection of a lone request, which combines the splits of attention on its way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phases.appendix.latency.few import FEW_TOKENS, TOKENS
from phases.appendix.latency.lone import LOG_STEP, LoneParts, splits_of
from phases.appendix.latency.lone_few import FewParts, few_splits_of
from phases.appendix.latency.tables import FewHeadsConfig, HeadsConfig
from triton_paged_attention.hardware import dependent_launch


@triton.jit
def combine_heads(
    partial, lse, used,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Attention's output from the `used` splits in the workspace, all heads: `[H_PAD, D_PAD / 8, 8]`."""
    # Heads as [D / 8, H, 8], where a thread owns the last axis, and their weights as [D / 8, H]: each thread
    # loads what it needs of both, and nothing has to pass between threads.
    e = tl.arange(0, D_PAD // 8)[:, None]
    h = tl.arange(0, H_PAD)[None, :]
    lane = tl.arange(0, 8)[None, None, :]
    present = (h < H) & (e >= 0)
    # Nobody has written a head's padding, and 0 times what it holds may be NaN.
    inside = present[:, :, None] if D == D_PAD else present[:, :, None] & (e[:, :, None] * 8 + lane < D)
    at_part = (h * D_PAD + e * 8)[:, :, None] + lane
    at_log = h * LOG_STEP + e * 0
    x = combine_parts(
        partial, lse, used, at_part, at_log, inside, present, H * D_PAD, H * LOG_STEP,
        ROWS=D_PAD // 8, COLUMNS=H_PAD, CHUNK=CHUNK,
    )  # fmt: skip
    return tl.permute(x, (1, 0, 2))


@triton.jit
def combine_parts(
    partial, lse, used, at_part, at_log, inside, present, part_step, log_step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The sum of `used` splits, each with its weight, `[ROWS, COLUMNS, 8]`.

    at_part `[ROWS, COLUMNS, 8]`, at_log `[ROWS, COLUMNS]`: where the first one's numbers and logarithms lie,
    and by how much further those of the next; inside, present: which of them may be read.
    """
    top = tl.full([ROWS, COLUMNS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x = tl.zeros([ROWS, COLUMNS, 8], tl.float32)
    for first in range(0, used, CHUNK):
        logs, parts = (), ()  # all loads of a chunk before the first use: they wait together
        for i in tl.static_range(CHUNK):
            here = partial + (first + i) * part_step + at_part
            parts += (tl.load(here, mask=inside & (first + i < used), other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(CHUNK):
            here = lse + (first + i) * log_step + at_log
            logs += (tl.load(here, mask=present & (first + i < used), other=-1.0e30),)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(CHUNK):
            new_top = tl.maximum(new_top, logs[i])
        shrink = tl.exp2(top - new_top)
        total, x, top = total * shrink, x * shrink[:, :, None], new_top
        for i in tl.static_range(CHUNK):
            portion = tl.exp2(logs[i] - top)  # 0 where there is no such split
            total += portion
            x += parts[i].to(tl.float32) * portion[:, :, None]
    return x / total[:, :, None]


@triton.jit
def heads_kernel(
    out, partial, lse, context_len, weight, bias, residual, N,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs: combine all heads' splits, then the product with these rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, H_PAD * D_PAD)
    column = k // D_PAD * D + k % D_PAD
    inside = (k // D_PAD < H) & (k % D_PAD < D)
    w = tl.load(
        weight + row.to(tl.int64)[:, None] * (H * D) + column[None, :],
        mask=(row < N)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    _, _, used = splits_of(tl.load(context_len), WINDOW, BLOCK_N, SPLITS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    added += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)

    x = combine_heads(partial, lse, used, H, H_PAD, D, D_PAD, CHUNK)
    vector = tl.reshape(x.to(w.dtype), [H_PAD * D_PAD]).to(tl.float32)  # rounded as attention's output is
    product = tl.sum(w.to(tl.float32) * vector[None, :], axis=1)
    tl.store(out + row, (product + added).to(out.dtype.element_ty), mask=row < N)


def project_heads(
    residual: Tensor,  # [1, N]
    weight: Tensor,  # [N, H D]
    bias: Tensor | None,  # [N]
    parts: LoneParts,
    *,
    shape: HeadsConfig,
) -> Tensor:
    """`residual + bias + weight @ attention's output`, the output in the workspace as `parts`: `[1, N]`."""
    layer, workspace, config = parts.layer, parts.workspace, parts.config
    heads, d, rows = layer.num_heads, layer.head_dim, weight.shape[0]
    out = torch.empty_like(residual)
    assert workspace.rows >= config.splits * heads * 2, f"the workspace has {workspace.rows} rows only"
    early = dependent_launch(residual.device)
    heads_kernel[(triton.cdiv(rows, shape.rows),)](
        out, workspace.partial.view(residual.dtype), workspace.lse, parts.context_lens, weight,
        residual if bias is None else bias, residual, rows,
        H=heads, H_PAD=triton.next_power_of_2(heads), D=d, D_PAD=max(16, triton.next_power_of_2(d)),
        WINDOW=layer.sliding_window or 0, BLOCK_N=config.block_n, SPLITS=config.splits,
        CHUNK=min(shape.chunk, config.splits), ROWS=shape.rows, BIAS=bias is not None,
        PDL=early, num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


@triton.jit
def few_heads_kernel(
    out, partial, lse, context_len, query_starts, weight, bias, residual, tokens, N,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs of all tokens: combine all splits, then a product as in `few_kernel`."""
    K: tl.constexpr = H * D
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    at = row.to(tl.int64)[None, :, None] * K + k[:, None, :]
    w = tl.load(weight + at, mask=(row < N)[None, :, None] & (k < K)[:, None, :], other=0.0)
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    count, _, _, _, used = few_splits_of(context_len, query_starts, WINDOW, BLOCK_N, SPLITS, MIN_TILES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_out = token[:, None].to(tl.int64) * N + row[None, :]
    keep = (token < tokens)[:, None] & (row < N)[None, :]
    more = tl.load(residual + at_out, mask=keep, other=0.0)

    e = tl.arange(0, PARTS * PART // 8)[:, None]  # eight inputs, which are of one head
    present = (e * 8 < K) & (token < count)[None, :]
    at_part = (token[None, :] * K + e * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    x = combine_parts(
        partial, lse, used, at_part, token[None, :] * H + e * 8 // D, present[:, :, None], present,
        CAPACITY * K, CAPACITY * H, ROWS=PARTS * PART // 8, COLUMNS=TOKENS, CHUNK=CHUNK,
    )  # fmt: skip
    # Rounded as attention's output is; tokens that are not there have a weight of nothing by nothing.
    vectors = tl.reshape(tl.permute(x.to(w.dtype), (1, 0, 2)), [TOKENS, PARTS, PART])
    product = tl.dot(tl.permute(vectors, (1, 0, 2)), tl.permute(w, (0, 2, 1)), input_precision="ieee")
    result = tl.sum(product, axis=0) + added[None, :] + more.to(tl.float32)
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=keep)


def project_few_heads(
    residual: Tensor,  # [T, N]
    weight: Tensor,  # [N, H D], D a multiple of 8
    bias: Tensor | None,  # [N]
    parts: FewParts,
    *,
    shape: FewHeadsConfig,
) -> Tensor:
    """`project_heads` for up to `FEW_TOKENS` tokens of one request: `[T, N]`; padding gets its residual."""
    layer, workspace, config = parts.layer, parts.workspace, parts.config
    tokens, rows = residual.shape
    assert tokens <= FEW_TOKENS and layer.head_dim % 8 == 0
    out = torch.empty_like(residual)
    early = dependent_launch(residual.device)
    few_heads_kernel[(triton.cdiv(rows, shape.rows),)](
        out, workspace.partial.view(residual.dtype), workspace.lse, parts.context_lens, parts.query_starts,
        weight, residual if bias is None else bias, residual, tokens, rows,
        H=layer.num_heads, D=layer.head_dim, WINDOW=layer.sliding_window or 0, BLOCK_N=config.block_n,
        SPLITS=config.splits, MIN_TILES=config.min_tiles, CAPACITY=triton.next_power_of_2(tokens),
        CHUNK=min(shape.chunk, config.splits), ROWS=shape.rows, PARTS=shape.num_warps, PART=shape.part,
        BIAS=bias is not None, PDL=early,
        num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
