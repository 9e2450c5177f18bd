"""Paged decode attention, version 2: query heads of one key/value head share a tile, and tiles span blocks.

Two changes to version 1. A program now owns a *key/value head* and all the query heads that read it, so
each key is loaded once instead of `H / KH` times; the tile of queries is padded to 16 rows, the smallest a
tensor core takes. And an iteration computes a tile of `BLOCK_N` tokens whatever the size of a block is:
each token of the tile looks up its own block. With several tiles in flight (`num_stages`) the loop no
longer waits for memory in every iteration.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks
from triton_paged_attention.kernels.kv_store import attention_arguments
from triton_paged_attention.tiles import LOG2_E, fold, no_keys, raw_scores


@triton.jit
def decode_v2_kernel(
    out, q, k_cache, v_cache, block_tables, context_lens, scale,
    table_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute attention of all query heads of one key/value head. One program per request and key/value head.

    out, q: `[B, H, D]`. k_cache, v_cache: `[N, P, KH, D]`. block_tables: `[B, max_blocks]`. context_lens:
        `[B]`, the new token included. scale: by which scores are multiplied.
    table_stride: numbers from one request's block table to the next. block_stride, slot_stride,
        head_stride: numbers from a block, token or head of the cache to the next.
    GROUP: query heads of a key/value head, padded to BLOCK_M rows. P: tokens of a block. BLOCK_N: tokens of
        a tile. D_PAD: D rounded up to a power of two.
    WINDOW: tokens that a query sees; 0: all.
    """
    request, kv_head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + request)
    row = tl.arange(0, BLOCK_M)  # row r of the tile is query head kv_head * GROUP + r
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    at_q = (request * H + kv_head * GROUP + row)[:, None] * D + d[None, :]
    row_is_real = (row < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + at_q, mask=row_is_real, other=0.0)

    m, total, acc = no_keys(BLOCK_M, D_PAD)
    first_key = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    for start in range(first_key // BLOCK_N * BLOCK_N, context, BLOCK_N):
        key = start + n
        visible = (key < context) & (key >= first_key)
        block = tl.load(
            block_tables + request * table_stride + key // P, mask=visible, other=0
        ).to(tl.int64)
        at = (
            (block * block_stride + (key % P) * slot_stride)[:, None]
            + kv_head * head_stride
            + d[None, :]
        )
        mask = visible[:, None] & (d < D)[None, :]
        keys = tl.load(k_cache + at, mask=mask, other=0.0)
        values = tl.load(v_cache + at, mask=mask, other=0.0)
        s = raw_scores(query, keys)
        s = tl.where(visible[None, :], s, float("-inf"))
        m, total, acc = fold(s, values, m, total, acc, scale * LOG2_E)
    tl.store(out + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=row_is_real)


def paged_decode_v2(
    layer: LayerSpec,
    q: Tensor,  # [B, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]; numbers of the model's dtype, without scales
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lens: Tensor,  # [B] int32
    *,
    block_n: int = 64,
) -> Tensor:
    """Return attention of one new token per request over the paged cache: `[B, H, D]`.

    layer: its score scale and sliding window are used. q: `[B, H, D]`.
    cache: the layer's blocks, `[N, P, KH, D]` each for keys and values.
    block_tables: `[B, max_blocks]` int32. context_lens: `[B]` int32, the new token included.
    block_n: tokens of a tile, which one iteration computes.
    """
    shared = attention_arguments(layer, cache, block_tables)
    out = torch.empty_like(q)
    decode_v2_kernel[(len(q), layer.num_kv_heads)](
        out, q, cache.k, cache.v, block_tables, context_lens,
        BLOCK_M=max(16, triton.next_power_of_2(shared["GROUP"])), BLOCK_N=block_n,
        **shared, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
