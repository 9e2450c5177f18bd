"""Paged prefill attention: any mix of chunk lengths and cached prefixes in one launch.

The unit of work is a *query tile*: up to `BLOCK_M` rows, which are `BLOCK_M // GROUP` consecutive query
tokens of one request times the query heads that share one key/value head. The host lists the tiles (it
knows the query lengths), longest first, so that the short ones fill the gaps at the end: under a causal
mask the last tile of a prompt reads everything and the first almost nothing.

Of the keys a tile reads, all but the last few are visible to every row. They go through a loop without any
mask; only the tiles on the diagonal pay for one, and keys after the diagonal are never touched (early
exit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .tiles import attend
from .tma import describe
from .tuning import PrefillConfig, prefill_config


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out, q,  # [T, H, D]
    k_cache, v_cache, block_tables, context_lens, query_starts,
    tiles,  # [number of tiles, 2]: request, first query token within it
    scale, soft_cap, table_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One program per query tile and key/value head."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    first_row = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - first_row
    context = tl.load(context_lens + request)

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    token = first + row // GROUP
    origin = ((first_row + first).to(tl.int64) * H + kv_head * GROUP) * D  # of the tile's first row
    at_q = ((row // GROUP) * H + row % GROUP)[:, None] * D + d[None, :]
    real = (token < count)[:, None] & (d < D)[None, :]
    if BLOCK_M % GROUP != 0:
        real = real & (row < TOKENS * GROUP)[:, None]
    query = tl.load(q + origin + at_q, mask=real, other=0.0)
    position = context - count + token

    # Keys [begin, whole) are visible to every row, [whole, end) to some.
    first_position = context - count + first
    end = tl.minimum(first_position + TOKENS, context)
    if WINDOW > 0:  # the window's edge runs through the first tiles, so mask them all
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        begin = 0
        whole = (first_position + 1) // BLOCK_N * BLOCK_N

    table = block_tables + request * table_stride
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    m, total, acc = attend(
        query, position, m, total, acc, k_cache, v_cache, table, kv_head, begin, whole, scale, soft_cap,
        block_stride, slot_stride, head_stride, D, D_PAD, P, BLOCK_N, False, False, 0, SOFT_CAP, TMA,
    )  # fmt: skip
    m, total, acc = attend(
        query, position, m, total, acc, k_cache, v_cache, table, kv_head, whole, end, scale, soft_cap,
        block_stride, slot_stride, head_stride, D, D_PAD, P, BLOCK_N, True, True, WINDOW, SOFT_CAP, TMA,
    )  # fmt: skip
    acc = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]  # one division per row, not per number
    tl.store(out + origin + at_q, acc.to(out.dtype.element_ty), mask=real)


def query_tiles(
    query_lens: Sequence[int] | NDArray[np.integer],
    context_lens: Sequence[int] | NDArray[np.integer],
    tokens: int,
) -> NDArray[np.int32]:
    """The tiles of a batch, `[n, 2]` of (request, first query token), those that read most keys first.

    `tokens` is the number of query tokens in a tile. Pure numpy, no loop over requests: it runs every step.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    per_request = -(-lens // tokens)
    request = np.repeat(np.arange(len(lens)), per_request)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    last_key = np.asarray(context_lens, dtype=np.int64)[request] - lens[request] + (nth + 1) * tokens
    order = np.argsort(-last_key, kind="stable")
    return np.stack([request, nth * tokens], axis=1)[order].astype(np.int32)


def paged_prefill(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, P, KH, D]
    v_cache: Tensor,
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lens: Tensor,  # [B] int32
    query_starts: Tensor,  # [B + 1] int32
    tiles: Tensor,  # [n, 2] int32, from query_tiles with the same config
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Causal attention of ragged queries over the paged cache: `[T, H, D]`; other rows stay as they are."""
    heads, d = q.shape[1:]
    _, block_size, kv_heads, _ = k_cache.shape
    d_pad = max(16, triton.next_power_of_2(d))
    config = config or prefill_config(d_pad, q.element_size(), q.device)
    out = torch.empty_like(q) if out is None else out
    if len(tiles) == 0:
        return out
    k_arg, v_arg = (describe(c, config.block_n) if config.tma else c for c in (k_cache, v_cache))
    options = {"maxnreg": config.maxnreg} if config.maxnreg and q.is_cuda else {}
    prefill_kernel[(len(tiles), kv_heads)](
        out, q, k_arg, v_arg, block_tables, context_lens, query_starts, tiles,
        scale, soft_cap or 1.0, block_tables.stride(0), *k_cache.stride()[:3],
        H=heads, GROUP=heads // kv_heads, D=d, D_PAD=d_pad, P=block_size,
        WINDOW=sliding_window or 0, SOFT_CAP=soft_cap is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TMA=config.tma,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return out
