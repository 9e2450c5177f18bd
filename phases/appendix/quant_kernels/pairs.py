"""A layout of e4m3 values in the KV cache: those of tokens 2 i and 2 i + 1 alternate, byte by byte.

A matrix unit of 16-bit numbers needs the values of two neighbouring tokens side by side in a register. With
16-bit values a transposing load does that, but no load transposes bytes: loading values one by one would take
more time than half the bytes save. So they are stored side by side, a pair is loaded as one 16-bit word, and
the even and the odd tokens' values are two products.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_paged_attention.kernels.kv_store import ValueLayout
from triton_paged_attention.tables import DecodeConfig, PrefillConfig
from triton_paged_attention.tiles import LOG2_E, hide, lookup, raw_scores

LEAST_TILE = 32
"""Tokens of a tile, at least: a matrix unit takes 16 keys at a time, and even and odd ones are apart."""

EVEN = tl.constexpr(
    "{.reg .b32 t; .reg .b16 h, z; prmt.b32 t, $1, 0, 0x4420; mov.b32 {h, z}, t; cvt.rn.f16x2.e4m3x2 $0, h;}"
)
ODD = tl.constexpr(
    "{.reg .b32 t; .reg .b16 h, z; prmt.b32 t, $1, 0, 0x4431; mov.b32 {h, z}, t; cvt.rn.f16x2.e4m3x2 $0, h;}"
)
"""Of two words in one register: their lower or higher bytes, which are e4m3, as two float16 numbers."""


@triton.jit
def byte_of(words, odd: tl.constexpr, PRODUCT: tl.constexpr, ASM: tl.constexpr):
    """Return the values of the odd tokens in `words` if `odd`, else of the even ones, as type PRODUCT.

    words: int16, each the e4m3 values of two neighbouring tokens. ASM: convert by a PTX instruction.
    """
    if ASM:
        values = tl.inline_asm_elementwise(
            ODD if odd else EVEN, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        number = ((words.to(tl.int32) >> (8 if odd else 0)) & 255).to(tl.uint8)
        values = number.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(PRODUCT)
    return values


@triton.jit
def attend_pairs(
    query,  # [M, D]
    position,  # [M]
    m, total, acc,
    k_cache,  # pointer to [N, P, KH, D], e4m3
    v_cache,  # pointer to [N, P / 2, KH, D], words
    table, kv_head, low, high, whole, scale, block_stride, slot_stride, head_stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Fold one request's keys [low, high) into the online softmax of queries; return (m, total, acc).

    m, total, acc: `[M]`, `[M]` and `[M, D_PAD]`: each query's largest score, sum of weights, and weighted sum
        of values so far. query: `[M, D]`. position: `[M]`. scale: of scores.
    k_cache: `[N, P, KH, D]` e4m3. v_cache: int16 words `[N, P / 2, KH, D]`, each of two neighbouring tokens'
        e4m3 values. P: tokens of a block. kv_head: index of the key/value head. Strides in numbers. table:
        pointer to the block table.
    MASK: "none": every query sees every key. "all": mask every tile. CAUSAL: a query sees no later keys.
    WINDOW: tokens that a query sees, 0: all. whole: not used. `low` must be even, and TMA False.
    """
    PRODUCT: tl.constexpr = query.dtype if query.dtype == tl.float32 else tl.float16
    ASM: tl.constexpr = query.dtype != tl.float32
    pair = 2 * tl.arange(0, BLOCK_N // 2)
    d = tl.arange(0, acc.shape[1])
    inside = (d < D)[None, :]
    factor = scale * LOG2_E
    query = query.to(PRODUCT)
    block = lookup(table, low, high, pair, P, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        next_block = lookup(table, start + BLOCK_N, high, pair, P, BLOCK_N)
        key = start + pair
        first = (key < high)[:, None] & inside
        if P % BLOCK_N == 0:
            # One block: its address is one number, and offsets in it are small ones.
            base = (
                block.to(tl.int64) * block_stride
                + start % P * slot_stride
                + kv_head * head_stride
            )
            base_v = base - (block.to(tl.int64) * block_stride + start % P * slot_stride) // 2
            at = pair[:, None] * slot_stride + d[None, :]
            at_v = (pair // 2)[:, None] * slot_stride + d[None, :]
        else:
            base = kv_head.to(tl.int64) * head_stride
            base_v = base
            at = (block.to(tl.int64) * block_stride + key % P * slot_stride)[:, None] + d[
                None, :
            ]
            at_v = (block.to(tl.int64) * (block_stride // 2) + key % P // 2 * slot_stride)[
                :, None
            ] + d[None, :]
        keys = tl.load(k_cache + base + at, mask=first, other=0.0)
        odd_keys = k_cache + base + slot_stride
        next_keys = tl.load(odd_keys + at, mask=(key + 1 < high)[:, None] & inside, other=0.0)
        words = tl.load(v_cache + base_v + at_v, mask=first, other=0)
        even = raw_scores(query, keys.to(PRODUCT))
        odd = raw_scores(query, next_keys.to(PRODUCT))
        if MASK == "all":
            even = hide(even, key, position, start, high, CAUSAL, WINDOW, False)
            odd = hide(odd, key + 1, position, start, high, CAUSAL, WINDOW, False)
        top = tl.maximum(tl.max(even, axis=1), tl.max(odd, axis=1))
        new_m = tl.maximum(m, top * factor)
        shrink = tl.exp2(m - new_m)
        p_even = tl.exp2(even * factor - new_m[:, None])
        p_odd = tl.exp2(odd * factor - new_m[:, None])
        total = total * shrink + tl.sum(p_even + p_odd, axis=1)
        acc = acc * shrink[:, None]
        # The last pair may have no odd token. What lies there has weight 0 and is a number, for none but
        # numbers are ever stored (see `kv_store.encode`). Hiding it would cost a trip through shared memory.
        acc = tl.dot(
            p_even.to(PRODUCT),
            byte_of(words, False, PRODUCT, ASM),
            acc,
            input_precision="ieee",
        )
        acc = tl.dot(
            p_odd.to(PRODUCT), byte_of(words, True, PRODUCT, ASM), acc, input_precision="ieee"
        )
        m = new_m
        block = next_block
    return m, total, acc


@triton.jit
def pair_place(slot, block_stride, slot_stride, P: tl.constexpr):
    """Return the offset of a token's first number in a cache of pairs, and its numbers' distance, 2.

    In a pair, the numbers of two neighbouring tokens alternate; so one token's numbers are 2 apart.
    slot: block times P plus offset in the block. block_stride, slot_stride: numbers from one block or token
        to the next.
    """
    return (slot // P) * block_stride + (slot % P) // 2 * 2 * slot_stride + slot % 2, 2


def fit(config: DecodeConfig | PrefillConfig, block_size: int) -> DecodeConfig | PrefillConfig:
    """Return a kernel's `config` with tile sizes for a cache whose values (V) are stored in pairs of tokens,
    the bytes of both in turn.

    Prefill does without TMA; tiles have at least `LEAST_TILE` tokens, those of decoding twice as many as in
    `config` if that divides a block.

    block_size: tokens of a block of the KV cache.
    """
    block_n = max(config.block_n, LEAST_TILE)
    if isinstance(config, PrefillConfig):
        return replace(config, block_n=block_n, tma=False)
    return replace(config, block_n=block_n if block_size % (2 * block_n) else 2 * block_n)


def words(values: Tensor) -> Tensor:
    """Return a view of e4m3 `values` as int16 words, each of two neighbouring tokens' values.

    values: laid out as `pair_place` says; the view's last axis has half the size.
    """
    return values.view(torch.int16)


PAIRS = ValueLayout(attend_pairs, pair_place, fit, words)
