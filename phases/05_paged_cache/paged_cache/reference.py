"""Paged attention written for reading, in float32: every kernel is compared with it.

One request at a time: gather its keys and values through the block table, build the mask, softmax,
multiply. Nothing here is fast, and nothing here should become fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_cache.pool import LayerBlocks


def gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Return the keys or values of a request's first `length` tokens: `[length, KH, D]`.

    cache: a layer's keys or values, `[N, P, KH, D]`. block_table: `[max_blocks]`, the request's blocks.
    """
    block_size = cache.shape[1]
    blocks = block_table[: -(-length // block_size)].long()
    return cache[blocks].flatten(0, 1)[:length]


def paged_attention(
    q: Tensor,  # [T, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]
    block_tables: Tensor,  # [B, max_blocks] int32
    query_starts: Tensor,  # [B + 1] int32
    context_lens: Tensor,  # [B] int32, every key of a request, those of this step included
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Return the attention `[T, H, D]` of ragged queries over a paged cache, in float32; for tests.

    q: `[T, H, D]`. cache: a layer's blocks. block_tables: `[B, max_blocks]`. query_starts: `[B + 1]`, where
        each request's queries begin and end.
    context_lens: `[B]`, keys of each request, the new ones included. scale: by which scores are multiplied.
    sliding_window: number of keys that a query sees, its own included; None: all up to its own.

    Query `i` of a request with `n` queries and `c` keys stands at position `c - n + i` and sees the keys up
    to its own position, and with a sliding window `w` only the last `w` of them.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    for b, context in enumerate(contexts):
        rows = slice(starts[b], starts[b + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        group = q.shape[1] // cache.k.shape[2]
        k, v = (gather(numbers, block_tables[b], context).float() for numbers in cache[:2])
        if cache.k_scale is not None and cache.v_scale is not None:
            k, v = k * cache.k_scale[:, None], v * cache.v_scale[:, None]
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))  # [C, H, D]
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        position = torch.arange(context - count, context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)[None, :]
        hidden = key > position
        if sliding_window is not None:
            hidden |= key <= position - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out
