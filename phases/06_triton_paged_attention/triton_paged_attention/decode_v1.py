"""Paged decode attention, version 1: one program per request and query head, one KV cache block at a time.

The whole algorithm is here. A program owns one query vector and walks the request's block table. For each
block it loads the keys, computes their scores, and folds them into a running softmax (Milakov and
Gimelshein 2018): `m` is the largest score so far, `total` the sum of exp(score - m), `acc` the same sum
weighted by the values. When a larger score appears, what was summed so far shrinks by exp(old m - new m).
No score is ever written to memory.

What is slow: the query heads that share a key/value head each read it from memory again; a block of 16
tokens is too little work between two dependent loads (the block id, then the keys); a batch of one request
fills only H of the GPU's multiprocessors. Versions 2, 3 and 4 repair these in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks
from triton_paged_attention.kernels.kv_store import attention_arguments


@triton.jit
def decode_v1_kernel(
    out,  # [B, H, D]
    q,  # [B, H, D]
    k_cache,  # [N, P, KH, D]
    v_cache,
    block_tables,  # [B, max_blocks]
    context_lens,  # [B]
    scale,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
):
    """Compute attention of one request's query head, block by block. One program per request and query head.

    out, q: `[B, H, D]`. k_cache, v_cache: `[N, P, KH, D]`. block_tables: `[B, max_blocks]`. context_lens:
        `[B]`, the new token included.
    table_stride: numbers from one request's block table to the next. block_stride, slot_stride,
        head_stride: numbers from a block, token or head of the cache to the next.
    GROUP: query heads of a key/value head. P: tokens of a block. D_PAD, P_PAD: D and P rounded up to a
        power of two. scale: by which scores are multiplied.
    WINDOW: tokens that a query sees; 0: all.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + request)
    slot = tl.arange(0, P_PAD)
    d = tl.arange(0, D_PAD)
    query = (
        tl.load(q + (request * H + head) * D + d, mask=d < D, other=0.0).to(tl.float32) * scale
    )

    m = -1.0e30  # finite, so that exp(-inf - m) is 0 and never NaN
    total = 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    first_key = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    for i in range(first_key // P, tl.cdiv(context, P)):
        block = tl.load(block_tables + request * table_stride + i).to(tl.int64)
        key = i * P + slot
        visible = (slot < P) & (key < context) & (key >= first_key)
        at = (
            block * block_stride
            + slot[:, None] * slot_stride
            + (head // GROUP) * head_stride
            + d[None, :]
        )
        keys = tl.load(k_cache + at, mask=visible[:, None] & (d < D)[None, :], other=0.0).to(
            tl.float32
        )
        score = tl.sum(keys * query[None, :], axis=1)  # [P]
        score = tl.where(visible, score, float("-inf"))
        new_m = tl.maximum(m, tl.max(score, axis=0))
        shrink = tl.exp(m - new_m)
        p = tl.exp(score - new_m)
        values = tl.load(v_cache + at, mask=visible[:, None] & (d < D)[None, :], other=0.0).to(
            tl.float32
        )
        acc = acc * shrink + tl.sum(p[:, None] * values, axis=0)
        total = total * shrink + tl.sum(p, axis=0)
        m = new_m
    tl.store(
        out + (request * H + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D
    )


def paged_decode_v1(
    layer: LayerSpec,
    q: Tensor,  # [B, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]; numbers of the model's dtype, without scales
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lens: Tensor,  # [B] int32
) -> Tensor:
    """Return attention of one new token per request over the paged cache: `[B, H, D]`.

    layer: its score scale and sliding window are used. q: `[B, H, D]`.
    cache: the layer's blocks, `[N, P, KH, D]` each for keys and values.
    block_tables: `[B, max_blocks]` int32. context_lens: `[B]` int32, the new token included.
    """
    shared = attention_arguments(layer, cache, block_tables)
    out = torch.empty_like(q)
    decode_v1_kernel[q.shape[:2]](
        out, q, cache.k, cache.v, block_tables, context_lens,
        P_PAD=triton.next_power_of_2(shared["P"]), **shared,
    )  # fmt: skip
    return out
