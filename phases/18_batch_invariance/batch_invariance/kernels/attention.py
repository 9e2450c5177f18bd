"""Attention over chunks of keys that end at fixed positions: one kernel for one query token and for many.

Three things may differ between launches, since no bit depends on them: the rows of a tile, the warps, and
how many programs share a request's chunks. Three are fixed: the keys of a tile, the keys of a chunk, and
the order in which chunks are combined. Weights of a tile are summed up as integers, whose sum is the same in
any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache import LayerBlocks
from triton_paged_attention.kernels.kv_store import attention_arguments
from triton_paged_attention.tiles import (
    LOG2_E,
    hide,
    load_tile,
    lookup,
    no_keys,
    raw_scores,
)

ONE: tl.constexpr = tl.constexpr(0x3F800000)
"""The bits of 1.0. From there to 2.0 a float's bits are an integer that grows by 2**23."""


@triton.jit
def sum_weights(p):
    """Return the sums `[M]` of the rows of `p [M, N]`, numbers from 0 to 1, equal in every bit for all
    layouts.

    Threads add up a row in an order that depends on the tile's shape and warps. So each number is rounded to
    a multiple of 2**-23 and added as an integer, and the sum is rounded once. N is at most 128.
    """
    whole = (p + 1.0).to(tl.int32, bitcast=True) - ONE
    return tl.sum(whole, axis=1).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def fold_tile(s, values, m, total, acc, factor):
    """Return the online softmax (m, total, acc), extended by raw scores `s [M, N]` and `values [N, D]`.

    m: `[M]`, the largest score. total: `[M]`, sum of weights. acc: `[M, D]`, weighted values. factor: turns
        raw scores into exponents of two (the attention scale times log2(e)).
    """
    largest = tl.maximum(m, tl.max(s, axis=1) * factor)
    weights = tl.exp2(s * factor - largest[:, None])
    kept = tl.exp2(m - largest)
    total = total * kept + sum_weights(weights)
    weights = weights.to(values.dtype)
    acc = tl.dot(weights, values, acc * kept[:, None], input_precision="ieee")
    return largest, total, acc


@triton.jit
def combine_chunk(m, total, acc, chunk_m, chunk_total, chunk_acc):
    """Return the online softmax (m, total, acc), extended by that of the chunk after it.

    m, total, acc: largest score `[M]`, sum of weights `[M]`, weighted values `[M, D]`. A name with `chunk_`
        is the same of the chunk. A chunk without keys changes no bit.
    """
    new_m = tl.maximum(m, chunk_m)
    mine, theirs = tl.exp2(m - new_m), tl.exp2(chunk_m - new_m)
    total = total * mine + chunk_total * theirs
    return new_m, total, acc * mine[:, None] + chunk_acc * theirs[:, None]


@triton.jit
def share_of_chunks(begin, end, split, splits, CHUNK: tl.constexpr):
    """Return the keys `low .. high - 1` that a program computes, and how many programs have any keys.

    begin, end: all keys of the tile are `begin .. end - 1`. split, splits: index of the program, and number
        of programs that share the tile.
    A program gets whole chunks, which end at multiples of CHUNK wherever `begin` and `end` are. How many it
    gets depends on `splits`, and so on the batch; no bit does, since each chunk's softmax is stored apart.
    """
    first_chunk = begin // CHUNK
    chunks = tl.maximum(tl.cdiv(end, CHUNK) - first_chunk, 0)
    share = tl.maximum(tl.cdiv(chunks, splits), 1)
    used = tl.maximum(tl.cdiv(chunks, share), 1)
    low = tl.maximum((first_chunk + split * share) * CHUNK, begin)
    high = tl.minimum((first_chunk + (split + 1) * share) * CHUNK, end)
    return low, high, used


@triton.jit(do_not_specialize=["table_stride", "most_chunks"])
def chunked_attention_kernel(
    out, q,  # [T, H, D]
    k_cache, v_cache, block_tables,
    tiles,  # [n, 4], see `query_tiles`; with TILED
    context_lens, query_starts, requests,  # without TILED
    chunk_acc, chunk_m, chunk_total, arrived,  # with SPLIT, see `Scratch`
    k_scale, v_scale,  # [KH]
    scale, table_stride, block_stride, slot_stride, head_stride, most_chunks,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr,
    TILED: tl.constexpr, RAGGED: tl.constexpr, SUBSET: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of query tokens for one key/value head, over some or all chunks of its
    keys.

    q, out: `[T, H, D]`. k_cache, v_cache: paged blocks of `P` tokens. block_tables: of each request.
    TILED: tiles come from `tiles`; else each request is a tile, or with SUBSET each of `requests`;
    `context_lens` has each request's keys, and with RAGGED `query_starts` where its tokens begin in `q`
    (else it has one token).
    GROUP: query heads of a key/value head. D_PAD: D, padded. BLOCK_M, BLOCK_N: padded rows, and keys, of a
    tile. table_stride, block_stride, slot_stride, head_stride: of block tables and cache, in elements.
    most_chunks: chunks of a request for which `chunk_acc` and the like have room.
    One program per key/value head, share of the chunks, and tile. With SPLIT it stores the softmax of each
    chunk (`chunk_acc`, `chunk_m`, `chunk_total`), and the last program of a tile to finish (`arrived` counts)
    combines them; else one program does all chunks.
    WINDOW: keys of a sliding window, 0: none. SCALED: keys and values are quantized. ROWS: of a tile, in
    `chunk_acc` and the like.
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(2)
    if TILED:
        request = tl.load(tiles + 4 * item)
        first_token = tl.load(tiles + 4 * item + 1)
        count = tl.load(tiles + 4 * item + 2)
        first_position = tl.load(tiles + 4 * item + 3)
    else:
        request = tl.load(requests + item) if SUBSET else item
        first_token = tl.load(query_starts + request) if RAGGED else request
        count = tl.load(query_starts + request + 1) - first_token if RAGGED else 1
        first_position = tl.load(context_lens + request) - count
    end = tl.where(count > 0, first_position + count, 0)
    begin = (
        tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
    )
    chunks = tl.maximum(tl.cdiv(end, CHUNK) - begin // CHUNK, 0)
    first_chunk = begin // CHUNK
    low = begin
    high = end
    used = 1
    if SPLIT:
        split = tl.program_id(1)
        low, high, used = share_of_chunks(begin, end, split, tl.num_programs(1), CHUNK)
        if split >= used:
            return

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    at_q = ((first_token + token).to(tl.int64) * H + head)[:, None] * D + d[None, :]
    real_row = token < count
    real = real_row[:, None] & (d < D)[None, :]
    query = tl.load(q + at_q, mask=real, other=0.0)
    position = first_position + token

    all_m, all_total, all_acc = no_keys(BLOCK_M, D_PAD)
    if SCALED:
        scale = scale * tl.load(k_scale + kv_head)
    factor = scale * LOG2_E
    slot = (item * tl.num_programs(0) + kv_head) * most_chunks

    table = block_tables + request * table_stride
    m, total, acc = no_keys(BLOCK_M, D_PAD)
    block = lookup(table, low, high, n, P, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        next_block = lookup(table, start + BLOCK_N, high, n, P, BLOCK_N)
        key = start + n
        keys, values = load_tile(
            k_cache, v_cache, block, start, key, high, kv_head, block_stride, slot_stride,
            head_stride, D=D, D_PAD=D_PAD, P=P, BLOCK_N=BLOCK_N, BOUNDED=True,
        )  # fmt: skip
        s = raw_scores(query, keys.to(query.dtype))
        if WINDOW > 0:
            s = hide(s, key, position, start, high, True, WINDOW, False)
        elif start + BLOCK_N > first_position + 1:  # some row may not see all of these keys
            s = hide(s, key, position, start, high, True, 0, False)
        m, total, acc = fold_tile(s, values.to(query.dtype), m, total, acc, factor)
        if ((start + BLOCK_N) % CHUNK == 0) | (start + BLOCK_N >= high):  # a chunk ends
            if SPLIT:
                at = (slot + start // CHUNK - first_chunk) * ROWS + row
                tl.store(chunk_acc + at[:, None] * D_PAD + d[None, :], acc, mask=real)
                tl.store(chunk_m + at, m, mask=real_row)
                tl.store(chunk_total + at, total, mask=real_row)
            else:
                all_m, all_total, all_acc = combine_chunk(
                    all_m, all_total, all_acc, m, total, acc
                )
            m, total, acc = no_keys(BLOCK_M, D_PAD)
        block = next_block

    if SPLIT:
        # All threads' stores first, then one release; the last program to count has acquired them all.
        tl.debug_barrier()
        counter = arrived + item * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") != used - 1:
            return
        tl.store(counter, 0)  # ready for the next launch
        for chunk in range(0, chunks):
            at = (slot + chunk) * ROWS + row
            m = tl.load(chunk_m + at, mask=real_row, other=-1.0e30, cache_modifier=".cg")
            total = tl.load(chunk_total + at, mask=real_row, other=0.0, cache_modifier=".cg")
            acc = tl.load(
                chunk_acc + at[:, None] * D_PAD + d[None, :], mask=real, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            all_m, all_total, all_acc = combine_chunk(all_m, all_total, all_acc, m, total, acc)
    result = all_acc * (1.0 / tl.where(all_total > 0, all_total, 1.0))[:, None]
    if SCALED:
        result = result * tl.load(v_scale + kv_head)
    tl.store(out + at_q, result.to(out.dtype.element_ty), mask=real)


class Scratch:
    """Memory for softmaxes of chunks, where several programs share a tile's chunks; allocated once.

    So CUDA graphs find it at a fixed address.
    rows: the largest product of tiles, key/value heads, chunks and rows of a tile for which there is memory.
    d_pad: numbers of a head, rounded up to a power of two.
    """

    def __init__(self, rows: int, d_pad: int, device: torch.device) -> None:
        self.rows, self.d_pad = rows, d_pad
        self.acc = torch.empty(rows * d_pad, dtype=torch.float32, device=device)
        self.m, self.total = torch.empty(2, rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


class Launch(NamedTuple):
    """Settings of a kernel launch, on which no bit of the result depends.

    block_m: rows of a tile. num_warps, num_stages: of Triton. splits: programs that share the chunks of a
        tile.
    maxnreg: most registers of a thread; None: as many as the compiler wants.
    """

    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    maxnreg: int | None = None


def chunked_attention(
    q: Tensor,  # [T, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]
    block_tables: Tensor,  # [B, max_blocks] int32
    layer: LayerSpec,
    *,
    chunk: int,
    block_n: int,
    launch: Launch,
    tiles: Tensor | None = None,
    context_lens: Tensor | None = None,  # [B] int32
    query_starts: Tensor | None = None,  # [B + 1] int32
    requests: Tensor | None = None,  # [R] int32
    max_queries: int = 1,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return causal attention of query tokens over the paged cache, `q [T, H, D]` -> `[T, H, D]`.

    Args:
        cache, block_tables, layer: the layer's blocks, each request's block numbers, the layer's sizes.
        chunk, block_n: keys of a chunk and of a tile, which decide the bits.
        launch: settings that decide no bit. Its `splits` count as 1 where the scratch memory lacks rows.
        tiles: `[n, 4]` int32, see `query_tiles`; None: each request, or each of `requests`, is one tile of
            at most `max_queries` tokens.
        context_lens, query_starts: without tiles, each request's number of keys, and where its tokens begin
            in `q`; no `query_starts`: each request has one token.
        requests: indices of the requests to compute; None: all.
        scratch: memory for launches whose tiles several programs share; None: one program computes a tile.
        out: result; allocated if None. Rows in no tile are not written.
    """
    arguments = attention_arguments(layer, cache, block_tables)
    out = torch.empty_like(q) if out is None else out
    kv_heads, group = layer.num_kv_heads, arguments["GROUP"]
    listed = tiles if tiles is not None else requests if requests is not None else context_lens
    assert listed is not None
    items = len(listed)
    if items == 0:
        return out
    rows = triton.next_power_of_2(max_queries) * group if tiles is None else launch.block_m
    most_chunks = triton.cdiv(block_tables.shape[1] * arguments["P"], chunk)
    splits = min(launch.splits, most_chunks)
    if scratch is None or items * kv_heads * most_chunks * rows > scratch.rows:
        splits = 1
    memory = (out,) * 4
    if splits > 1 and scratch is not None:
        memory = (scratch.acc, scratch.m, scratch.total, scratch.arrived)
    options = {"maxnreg": launch.maxnreg} if launch.maxnreg and q.is_cuda else {}
    chunked_attention_kernel[(kv_heads, splits, items)](
        out, q, cache.k, cache.v, block_tables,
        listed if tiles is None else tiles, listed if context_lens is None else context_lens,
        listed if query_starts is None else query_starts,
        listed if requests is None else requests, *memory,
        *(cache[2:4] if cache.scaled else (out, out)),
        most_chunks=most_chunks, **arguments,
        TILED=tiles is not None, RAGGED=query_starts is not None, SUBSET=requests is not None,
        SPLIT=splits > 1, ROWS=rows, BLOCK_M=launch.block_m, BLOCK_N=block_n, CHUNK=chunk,
        SCALED=cache.scaled, num_warps=launch.num_warps, num_stages=launch.num_stages,
        enable_fp_fusion=False, **options,
    )  # fmt: skip
    return out
