"""Paged decode attention, version 3: split the keys of one request over several programs (flash-decoding).

With 8 key/value heads and one request, version 2 has eight programs for 132 multiprocessors. In version 3,
`splits` programs share the keys of one request and head. Each writes the softmax over its keys, normalized,
and the base-2 logarithm of its sum; a second kernel combines them (Dao et al. 2023, "Flash-Decoding for
long-context inference"):

    out = sum_s 2**lse_s out_s / sum_s 2**lse_s

The number of splits is part of the launch; the number of keys in a split is computed on the device from the
context length, so that a captured CUDA graph stays right while contexts grow.
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
def decode_v3_kernel(
    partial,  # [B, H, SPLITS, D] float32
    lse,  # [B, H, SPLITS] float32
    q, k_cache, v_cache, block_tables, context_lens, scale,
    table_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute attention over one split (share) of a request's keys, for one key/value head.

    One program per request, key/value head and split.
    partial: output `[B, H, SPLITS, D]` float32, attention over the split's keys alone.
    lse: output `[B, H, SPLITS]` float32, log2 of the split's softmax sum, the weight of `partial`.
    q: `[B, H, D]`. k_cache, v_cache: `[N, P, KH, D]`. block_tables: `[B, max_blocks]`. context_lens: `[B]`.
    scale: by which scores are multiplied. Strides: numbers from a block table, block, token or head to the
        next.
    GROUP: query heads of a key/value head, padded to BLOCK_M rows. BLOCK_N: keys of a tile. P: tokens of a
        block. D_PAD: D rounded up to a power of two.
    WINDOW: tokens that a query sees; 0: all.
    """
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + request)
    row = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    head = request * H + kv_head * GROUP + row
    row_is_real = (row < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=row_is_real, other=0.0)

    first_key = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    begin = first_key // BLOCK_N * BLOCK_N
    keys_per_split = (
        tl.cdiv(tl.cdiv(context - begin, BLOCK_N), SPLITS) * BLOCK_N
    )  # in whole tiles
    low = begin + split * keys_per_split
    high = tl.minimum(low + keys_per_split, context)

    m, total, acc = no_keys(BLOCK_M, D_PAD)
    for start in range(low, high, BLOCK_N):
        key = start + n
        visible = (key < high) & (key >= first_key)
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

    # An empty split has total = 0 and m = -1e30: in the mix its weight is 2**-1e30 = 0.
    weight_sum = tl.where(total > 0, total, 1.0)
    acc = acc / weight_sum[:, None]
    at_split = head * SPLITS + split
    tl.store(partial + at_split[:, None] * D + d[None, :], acc, mask=row_is_real)
    tl.store(lse + at_split, m + tl.log2(weight_sum), mask=row < GROUP)


@triton.jit
def combine_kernel(
    out,  # [B, H, D]
    partial, lse,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Combine the outputs of all splits of the keys. One program per request and query head.

    out: `[B, H, D]`. partial: `[B, H, SPLITS, D]` float32, attention over each split's keys alone.
    lse: `[B, H, SPLITS]` float32, log2 of each split's softmax sum. D_PAD, SPLITS_PAD: D and SPLITS rounded
        up to a power of two.
    """
    head = tl.program_id(0)  # request * H + query head
    s = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, D_PAD)
    logs = tl.load(lse + head * SPLITS + s, mask=s < SPLITS, other=-1.0e30)
    weight = tl.exp2(logs - tl.max(logs, axis=0))
    mask = (s < SPLITS)[:, None] & (d < D)[None, :]
    parts = tl.load(
        partial + (head * SPLITS + s)[:, None] * D + d[None, :], mask=mask, other=0.0
    )
    mixed = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + head * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


def paged_decode_v3(
    layer: LayerSpec,
    q: Tensor,  # [B, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]; numbers of the model's dtype, without scales
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lens: Tensor,  # [B] int32
    *,
    splits: int = 8,
    block_n: int = 64,
) -> Tensor:
    """Return attention of one new token per request over the paged cache: `[B, H, D]`.

    layer: its score scale and sliding window are used. q: `[B, H, D]`.
    cache: the layer's blocks, `[N, P, KH, D]` each for keys and values.
    block_tables: `[B, max_blocks]` int32. context_lens: `[B]` int32, the new token included.
    splits: programs that share the keys of a request and head. block_n: tokens of a tile, which one
        iteration computes.
    """
    shared = attention_arguments(layer, cache, block_tables)
    batch, heads, d = q.shape
    out = torch.empty_like(q)
    partial = torch.empty(batch, heads, splits, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    decode_v3_kernel[(batch, layer.num_kv_heads, splits)](
        partial, lse, q, cache.k, cache.v, block_tables, context_lens,
        BLOCK_M=max(16, triton.next_power_of_2(shared["GROUP"])), BLOCK_N=block_n,
        SPLITS=splits, **shared, num_warps=4, num_stages=3,
    )  # fmt: skip
    combine_kernel[(batch * heads,)](
        out, partial, lse,
        D=d, D_PAD=shared["D_PAD"],
        SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out
