"""Paged decode attention, version 4, the one that the engine runs.

What it adds to version 3:

- The block ids of the next tile (a run of keys) are loaded while this tile is computed, and carried through
  the loop. Otherwise every load of keys waits for a load of block ids in the same iteration, and three
  pipeline stages buffer as little as two.
- When a tile never crosses a block (`P % BLOCK_N == 0`) one block id serves the whole tile.
- Splits of the keys that have no work return at once, a request that needs one split writes its result
  directly, and of several splits the last to finish combines them: one launch instead of two.
- A request may have several query tokens (a short chunk, or drafts to verify): row `r` of the query tile is
  query token `r // GROUP` and query head `r % GROUP` of this key/value head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks
from triton_paged_attention.kernels.kv_store import PLAIN, attention_arguments
from triton_paged_attention.tables import DecodeConfig, decode_default
from triton_paged_attention.tiles import LOG2_E, combine, no_keys, padded

MOST_SPLITS, LEAST_KEYS = 8, 128
"""Most splits, and least keys of a split, if requests have several tokens. On an H200 five tokens of 9 heads
behind 100, 300 and 1,000 others took 12.8, 13.1 and 13.7 us in up to 32 splits of 32 keys, most of it
combining; behind 100 others 5.3 in one."""


@triton.jit
def combine_rows(
    out, partial, lse, first_split, used, first_token, count, kv_head,
    H: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Combine the outputs of a request's splits (shares of its keys); write the result to `out [T, H, D]`.

    partial, lse: float32 outputs and log2 of the softmax sums, by split, query token and head of the group.
    first_split: row of the request's first split in these. used: how many splits have been written.
    first_token: row of the request's first query token in `out`. count: its query tokens, at most QUERIES.
    kv_head: the key/value head; its GROUP query heads are written. H: query heads in all. D_PAD,
    SPLITS_PAD: D and the number of splits, rounded up to a power of two.
    """
    # As many rows at a time as registers hold: each time waits for its loads.
    ROWS: tl.constexpr = (
        2 if QUERIES * GROUP <= 2
        else 4 if QUERIES * GROUP <= 4 or SPLITS_PAD > 16
        else 8 if QUERIES * GROUP <= 8 or SPLITS_PAD > 8
        else 16
    )  # fmt: skip
    d = tl.arange(0, D_PAD)
    split = tl.arange(0, SPLITS_PAD)
    for first in tl.range(0, count * GROUP, ROWS):
        r = first + tl.arange(0, ROWS)
        at_r = (first_split + split)[:, None] * (QUERIES * GROUP) + r[None, :]
        filled = (split < used)[:, None] & (r < count * GROUP)[None, :]
        mixed = combine(partial, lse, at_r, filled, d, D, D_PAD)
        at_out = ((first_token + r // GROUP) * H + kv_head * GROUP + r % GROUP)[
            :, None
        ] * D + d[None, :]
        keep = (r < count * GROUP)[:, None] & (d < D)[None, :]
        tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out, q,  # [T, H, D]
    k_cache, v_cache, block_tables, context_lens, query_starts, requests, partial, lse,
    arrived,
    k_scale, v_scale, sinks,  # [KH], [KH], [H]
    scale, table_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr, MIN_TILES: tl.constexpr, ATTEND: tl.constexpr,
):  # fmt: skip
    """Compute one split (share) of a request's keys for one key/value head; the last to finish combines all.

    One program per key/value head, split and request.
    out, q: `[T, H, D]`. k_cache, v_cache: `[N, P, KH, D]`, `N` blocks of `P` tokens.
    block_tables: `[B, max_blocks]`. context_lens: `[B]`. sinks: `[H]`, extra scores in the softmax's sum,
        or None. scale: of scores. Strides: numbers (not bytes) from a block table, block, slot (token) or
        head to the next.
    partial, lse, arrived: workspace: float32 outputs of splits, log2 of their softmax sums, and counters of
        finished splits, which are 0 before and after the launch.
    k_scale, v_scale: `[KH]`, by which a head's stored keys and values are multiplied, or None.
    query_starts: `[B + 1]`, where requests' query tokens begin, up to QUERIES each; None: one token each.
    requests: indices of the only requests to compute; None: all.
    ATTEND: the device function that loops over tiles of keys, such as `tiles.attend`.
    GROUP: query heads of a key/value head. BLOCK_M: rows of the query tile. SPLITS_PAD, D_PAD: the
        number of splits, and D, rounded up to a power of two.
    MIN_TILES: fewest tiles of BLOCK_N keys in a split. WINDOW: keys that a query sees; 0: all.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    item = tl.program_id(2)
    # The grid's, not a constant: batch sizes have many numbers of splits, and each would be compiled anew.
    splits = tl.num_programs(1)
    request = tl.load(requests + item) if requests is not None else item
    context = tl.load(context_lens + request)
    first_token = request
    count = 1
    if query_starts is not None:
        first_token = tl.load(query_starts + request)
        count = tl.load(query_starts + request + 1) - first_token

    # The keys this program reads: [low, high), in whole tiles.
    first_position = context - count
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    begin = first_key // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(context - begin, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    used = tl.cdiv(tiles, tiles_per_split)  # splits that have work
    low = begin + split * tiles_per_split * BLOCK_N
    high = tl.minimum(low + tiles_per_split * BLOCK_N, context)
    if SPLITS_PAD > 1 and split > 0 and split >= used:
        return

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    token = row // GROUP
    at_q = ((first_token + token) * H + kv_head * GROUP + row % GROUP)[:, None] * D + d[
        None, :
    ]
    real = (token < count)[:, None] & (d < D)[None, :]
    query = tl.load(q + at_q, mask=real, other=0.0)
    position = first_position + token

    table = block_tables + request * table_stride
    m, total, acc = no_keys(BLOCK_M, D_PAD)
    if sinks is not None and split == 0:  # a key of value 0 that every row sees
        m = tl.load(sinks + kv_head * GROUP + row % GROUP).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    if (
        k_scale is not None
    ):  # a head's scales are factors of all its scores, and of all its outputs
        scale = scale * tl.load(k_scale + kv_head)
    m, total, acc = ATTEND(
        query, position, m, total, acc, k_cache, v_cache, table, kv_head, low, high, high,
        scale, block_stride, slot_stride, head_stride, D=D, P=P,
        BLOCK_N=BLOCK_N,
        MASK="all", CAUSAL=QUERIES > 1, WINDOW=WINDOW, TMA=False,
    )  # fmt: skip

    weight_sum = tl.where(
        total > 0, total, 1.0
    )  # total 0: a row that sees none of these keys, m = -1e30
    acc = acc * (1.0 / weight_sum)[:, None]
    if k_scale is not None:
        acc = acc * tl.load(v_scale + kv_head)
    if SPLITS_PAD == 1 or used <= 1:
        tl.store(out + at_q, acc.to(out.dtype.element_ty), mask=real)
    else:
        slot = item * tl.num_programs(0) + kv_head
        at_split = (slot * splits + split) * (QUERIES * GROUP) + row
        tl.store(partial + at_split[:, None] * D_PAD + d[None, :], acc, mask=real)
        tl.store(lse + at_split, m + tl.log2(weight_sum), mask=token < count)
        # All threads' stores first, then one release; the last program to count has acquired them all.
        tl.debug_barrier()
        if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == used - 1:
            tl.store(arrived + slot, 0)  # ready for the next launch
            combine_rows(
                out, partial, lse, slot * splits, used, first_token, count, kv_head,
                H=H, GROUP=GROUP, QUERIES=QUERIES, D=D, D_PAD=D_PAD, SPLITS_PAD=SPLITS_PAD,
            )  # fmt: skip


class Workspace:
    """Memory for partial results of the decode kernel, whose programs split a request's keys among them.

    It is allocated once, and used by every layer and step. Launches that share a workspace must run on one
    stream. A captured CUDA graph must keep its workspace alive.

    Args:
        rows: the most that a launch may have of (request, key/value head) pairs, times splits, times rows
            of a query tile.
        d_pad: a head's size, rounded up to a power of two.
        device: a GPU, or the CPU for the interpreter.
    """

    def __init__(self, rows: int, d_pad: int, device: torch.device | str) -> None:
        self.rows = rows
        self.partial = torch.empty(rows * d_pad, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows, dtype=torch.int32, device=device)


def paged_decode(
    layer: LayerSpec,
    q: Tensor,  # [T, H, D]
    cache: LayerBlocks,  # [N, P, KH, D]
    block_tables: Tensor,  # [B, max_blocks] int32
    context_lens: Tensor,  # [B] int32
    *,
    query_starts: Tensor | None = None,  # [B + 1] int32; None: one token per request, T == B
    max_queries: int = 1,
    requests: Tensor | None = None,  # [R] int32: only these requests of the batch; None: all
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Return attention `[T, H, D]` of requests with 1 to `max_queries` new tokens over the paged cache.

    layer: its scale, window and sinks. q: `[T, H, D]`. cache: the layer's blocks.
    block_tables: `[B, max_blocks]` int32. context_lens: `[B]` int32; a request with 0 (padding) gets zeros.
    query_starts: `[B + 1]` int32, where each request's tokens begin and end; None: each has one token.
    max_queries: most new tokens of a request, a power of two.
    requests: int32, indices of the requests to compute; None: all. Rows of the others are not written.
    out: tensor for the result; workspace: memory for partial results; None: allocated by this call.
    config: block sizes; None: the default.
    """
    kv_heads = layer.num_kv_heads
    items = len(context_lens if requests is None else requests)
    out = torch.empty_like(q) if out is None else out
    shared = attention_arguments(layer, cache, block_tables)
    d_pad = shared["D_PAD"]
    if config is None:
        config = decode_default(items * kv_heads, d_pad, cache.k.element_size(), q.device)
        if max_queries > 1:  # more rows to combine for each split: fewer, longer ones
            least = LEAST_KEYS // config.block_n
            config = replace(config, splits=min(config.splits, MOST_SPLITS), min_tiles=least)
    layout = cache.layout or PLAIN
    config = layout.fit(config, shared["P"])
    rows = max_queries * shared["GROUP"]  # of a program
    needed = items * kv_heads * config.splits * rows if config.splits > 1 else 0
    workspace = workspace or Workspace(needed, d_pad, q.device)
    assert workspace.rows >= needed, (
        f"the workspace has {workspace.rows} rows, but {needed} are needed"
    )
    decode_kernel[(kv_heads, config.splits, items)](
        out, q, cache.k, layout.words(cache.v), block_tables, context_lens, query_starts,
        requests, workspace.partial, workspace.lse, workspace.arrived,
        *cache[2:4], layer.sinks, **shared, QUERIES=max_queries,
        BLOCK_M=padded(rows), BLOCK_N=config.block_n,
        SPLITS_PAD=triton.next_power_of_2(config.splits),
        MIN_TILES=config.min_tiles, ATTEND=layout.attend,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
