"""Paged prefill attention: any mix of chunk lengths and cached prefixes in one launch.

The unit of work is a *query tile*: up to `BLOCK_M` rows, which are `BLOCK_M // GROUP` consecutive query
tokens of one request times the `GROUP` query heads that share one key/value head. The host, which knows the
query lengths, lists the tiles, longest first, so that the short ones fill the gaps at the end: under a
causal mask the last tile of a prompt reads all its keys and the first almost none.

Keys are read in tiles as well. All but the last of these are visible to every row and need no mask: only
those on the diagonal are masked, and keys after the diagonal are never read (early exit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks
from triton_paged_attention.kernels.kv_store import PLAIN, attention_arguments, describe
from triton_paged_attention.tables import PrefillConfig
from triton_paged_attention.tiles import LOG2_E, no_keys


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out, q,  # [T, H, D]
    k_cache, v_cache, block_tables,
    tiles,  # [number of tiles, 4], see query_tiles
    k_scale, v_scale, sinks,  # [KH], [KH], [H]
    scale, table_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, ATTEND: tl.constexpr,
):  # fmt: skip
    """Compute causal attention of one query tile (a piece of a prompt) for one key/value head.

    One program per query tile and key/value head.
    out, q: `[T, H, D]`. k_cache, v_cache: the layer's blocks `[N, P, KH, D]`, with TMA (tensor
        memory accelerator) their descriptors.
    block_tables: `[B, max_blocks]`.
    tiles: `[n, 4]` int32 of `query_tiles`: request, row of the first query token in `q`, number of tokens,
        position of the first.
    k_scale, v_scale: `[KH]`, by which stored keys and values are multiplied, or None. sinks: `[H]`, extra
        scores in the softmax's sum, or None. scale: by which scores are multiplied.
    Strides: numbers from a block table, block, token or head to the next. WINDOW: tokens seen; 0: all.
    BLOCK_M: rows of a query tile: its tokens times the GROUP query heads of a key/value head.
    BLOCK_N: keys of a tile. P: tokens of a block. D_PAD: D rounded up to a power of two.
    ATTEND: the device function that loops over tiles of keys, such as `tiles.attend`.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 4 * tile)
    first_row = tl.load(tiles + 4 * tile + 1)
    tokens = tl.load(tiles + 4 * tile + 2)
    first_position = tl.load(tiles + 4 * tile + 3)

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    token = row // GROUP
    origin = (first_row.to(tl.int64) * H + kv_head * GROUP) * D
    at_q = (token * H + row % GROUP)[:, None] * D + d[None, :]
    real = (token < tokens)[:, None] & (d < D)[None, :]
    query = tl.load(q + origin + at_q, mask=real, other=0.0)
    position = first_position + token

    # Keys [begin, whole) are visible to every row, [whole, end) to some.
    end = first_position + tokens
    if WINDOW > 0:  # the window's edge runs through the first tiles, so mask them all
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        begin = 0
        whole = (first_position + 1) // BLOCK_N * BLOCK_N

    table = block_tables + request * table_stride
    m, total, acc = no_keys(BLOCK_M, D_PAD)
    if sinks is not None:  # see decode.py
        m = tl.load(sinks + kv_head * GROUP + row % GROUP).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    if k_scale is not None:  # see decode.py
        scale = scale * tl.load(k_scale + kv_head)
    # By TMA without a window, one loop: its tiles need no mask against what lies behind the last key.
    ONE_LOOP: tl.constexpr = TMA and WINDOW == 0
    if not ONE_LOOP:
        m, total, acc = ATTEND(
            query, position, m, total, acc, k_cache, v_cache, table, kv_head, begin, whole,
            whole, scale, block_stride, slot_stride, head_stride, D=D, P=P,
            BLOCK_N=BLOCK_N, MASK="none", CAUSAL=False, WINDOW=0, TMA=TMA,
        )  # fmt: skip
        begin = whole
    m, total, acc = ATTEND(
        query, position, m, total, acc, k_cache, v_cache, table, kv_head, begin, end, whole,
        scale, block_stride, slot_stride, head_stride, D=D, P=P, BLOCK_N=BLOCK_N,
        MASK="edge" if ONE_LOOP else "all", CAUSAL=True, WINDOW=WINDOW, TMA=TMA,
    )  # fmt: skip
    acc = (
        acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    )  # one division per row, not per number
    if k_scale is not None:
        acc = acc * tl.load(v_scale + kv_head)
    tl.store(out + origin + at_q, acc.to(out.dtype.element_ty), mask=real)


def query_tiles(
    query_lens: Sequence[int] | NDArray[np.integer],
    context_lens: Sequence[int] | NDArray[np.integer],
    tokens: int,
    only: NDArray[np.bool_] | bool = True,
) -> NDArray[np.int32]:
    """Return the query tiles (pieces of prompts) of a batch, `[n, 4]` int32, those that read most keys first.

    A tile is (request, row of its first query token in the ragged batch, number of query tokens, position
    of the first): all that a kernel's program must know, so that it starts with one load instead of a chain
    of them. Pure numpy without a loop over requests, since it runs in every step.

    query_lens, context_lens: `[B]`, new tokens of each request, and its keys, the new ones included.
    tokens: most query tokens of a tile. only: `[B]` bool, the requests that get tiles; True: all.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    starts = np.cumsum(lens) - lens
    per_request = np.where(only, -(-lens // tokens), 0)
    request = np.repeat(np.arange(len(lens)), per_request)
    nth = np.arange(len(request)) - np.repeat(
        np.cumsum(per_request) - per_request, per_request
    )
    first = nth * tokens
    count = np.minimum(lens[request] - first, tokens)
    position = np.asarray(context_lens, dtype=np.int64)[request] - lens[request] + first
    tiles = np.stack([request, starts[request] + first, count, position], axis=1)
    return tiles[np.argsort(-(position + count), kind="stable")].astype(np.int32)


def paged_prefill(
    layer: LayerSpec,
    q: Tensor,  # [T, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]
    block_tables: Tensor,  # [B, max_blocks] int32
    tiles: Tensor,  # [n, 4] int32, from query_tiles with the same config's block_m // (H / KH)
    config: PrefillConfig,
    out: Tensor,
) -> Tensor:
    """Return causal attention of ragged queries over the paged cache: `q [T, H, D]` -> `[T, H, D]`.

    layer: its scale, window and sinks. cache: the layer's blocks. block_tables: `[B, max_blocks]` int32.
    tiles: `[n, 4]` int32 of `query_tiles`: request, row of the first query token in `q`, number of tokens,
        position of the first; rows without a tile are not written.
    config: block sizes. out: tensor for the result.
    """
    shared = attention_arguments(layer, cache, block_tables)
    block_size = shared["P"]
    layout = cache.layout or PLAIN
    config = layout.fit(config, block_size)
    tma = (
        config.tma
        and block_size % config.block_n == 0
        and layer.head_dim == shared["D_PAD"] == cache.k.stride(2)
    )
    k_arg, v_arg = (
        describe(c, config.block_n) if tma else c for c in (cache.k, layout.words(cache.v))
    )
    prefill_kernel[(len(tiles), layer.num_kv_heads)](
        out, q, k_arg, v_arg, block_tables, tiles,
        *cache[2:4], layer.sinks, **shared,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TMA=tma, ATTEND=layout.attend,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg,
    )  # fmt: skip
    return out
