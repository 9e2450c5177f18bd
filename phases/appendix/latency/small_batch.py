"""Attention of two to eight tokens of a single request: drafts to verify, or a drafter that catches up.

This is `single_request.py` for more than one token, where a step is as much a chain of kernels as with one.
The keys of the new tokens are a tile of their own, which comes from registers; keys in the cache do not
depend on them and are loaded before the wait. The splits are combined as those of one token are: by every
program of the output projection (a `HeadCombiner`), or by the last split to arrive.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forward.attention import LayerSpec
from phases.appendix.latency.single_request import (
    SingleRequestInputs,
    SingleRequestSplits,
    launch,
    norm_and_turn,
    splits_of,
)
from phases.appendix.latency.tables import SingleRequestConfig
from triton_paged_attention.decode import Workspace, combine_rows
from triton_paged_attention.tiles import (
    LOG2_E,
    attend,
    fold,
    hide,
    load_tile,
    lookup,
    no_keys,
    raw_scores,
)

MAX_SMALL_BATCH = 8
"""Most tokens of a step."""
MOST_ROWS, WIDEST = 64, 128
"""Rows of a tile: new tokens times the query heads of a key/value head. Wider heads do not fit into registers
with all that is loaded before the wait."""
NEW = tl.constexpr(16)
"""Keys in the tile of new ones; tensor cores have no smaller one."""


@triton.jit
def small_batch_attention_kernel(
    out,  # [T, H, D]
    qkv, cos, sin, q_weight, k_weight, k_cache, v_cache, block_table, context_len,
    query_starts, slots,
    partial, lse, arrived, eps, scale, block_stride, slot_stride, head_stride,
    H: tl.constexpr, KH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WAIT_FOR_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one split of the cached keys for one key/value head; the last split takes the new keys, too.

    Row `r` of the tile is new token `r // GROUP` and query head `r % GROUP` of this key/value head.
    """
    kv_head, split = tl.program_id(0), tl.program_id(1)
    count = tl.load(query_starts + 1) - tl.load(query_starts)
    cached = tl.maximum(tl.load(context_len) - count, 0)
    # The first new token sees the most of what is cached.
    begin, tiles_per_split, used = splits_of(cached, cached, WINDOW, BLOCK_N, SPLITS)
    if split >= used:
        return
    low = begin + split * tiles_per_split * BLOCK_N
    high = tl.minimum(low + tiles_per_split * BLOCK_N, cached)

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    key = low + n
    block = lookup(block_table, low, high, n, P, BLOCK_N)
    keys, values = load_tile(
        k_cache, v_cache, block, low, key, high, kv_head, block_stride, slot_stride,
        head_stride,
        D=D, D_PAD=D_PAD, P=P, BLOCK_N=BLOCK_N, BOUNDED=True,
    )  # fmt: skip

    WIDTH: tl.constexpr = (H + 2 * KH) * D
    row = tl.arange(0, BLOCK_M)
    new = tl.arange(0, NEW)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    partner = (d + D // 2) % D  # the other number of each rotated pair, half a head away
    inside = (d < D)[None, :]
    real, fresh = (token < count)[:, None] & inside, (new < count)[:, None] & inside
    c = tl.load(cos + token[:, None] * D + d[None, :], mask=real, other=0.0)
    s = tl.load(sin + token[:, None] * D + d[None, :], mask=real, other=0.0)
    c_new = tl.load(cos + new[:, None] * D + d[None, :], mask=fresh, other=0.0)
    s_new = tl.load(sin + new[:, None] * D + d[None, :], mask=fresh, other=0.0)
    # not read without norms
    q_x = c
    q_y = c
    k_x = c_new
    k_y = c_new
    if NORM:
        q_x = tl.load(q_weight + d, mask=d < D, other=0.0)[None, :]
        q_y = tl.load(q_weight + partner, mask=d < D, other=0.0)[None, :]
        k_x = tl.load(k_weight + d, mask=d < D, other=0.0)[None, :]
        k_y = tl.load(k_weight + partner, mask=d < D, other=0.0)[None, :]
    slot = tl.load(slots + new, mask=new < count, other=-1)
    if PDL:
        gdc_wait()

    at_q = (token * WIDTH + head * D)[:, None]
    at_k = (new * WIDTH + (H + kv_head) * D)[:, None]
    x = tl.load(qkv + at_q + d[None, :], mask=real, other=0.0)
    y = tl.load(qkv + at_q + partner[None, :], mask=real, other=0.0)
    new_x = tl.load(qkv + at_k + d[None, :], mask=fresh, other=0.0)
    new_y = tl.load(qkv + at_k + partner[None, :], mask=fresh, other=0.0)
    new_values = tl.load(qkv + at_k + KH * D + d[None, :], mask=fresh, other=0.0)
    if PDL:  # not before: the weights that the next kernel reads would delay what this one waits for
        gdc_launch_dependents()
    query = norm_and_turn(x, y, q_x, q_y, c, s, eps, D=D, NORM=NORM, ONE_PLUS=ONE_PLUS)

    m, total, acc = no_keys(BLOCK_M, D_PAD)
    position = cached + token
    factor = scale * LOG2_E
    scores = raw_scores(query, keys.to(query.dtype))
    scores = hide(scores, key, position, low, high, CAUSAL=False, WINDOW=WINDOW, TMA=False)
    m, total, acc = fold(scores, values.to(query.dtype), m, total, acc, factor)
    m, total, acc = attend(
        query, position, m, total, acc, k_cache, v_cache, block_table, kv_head, low + BLOCK_N,
        high, high,
        scale, block_stride, slot_stride, head_stride, D=D, P=P,
        BLOCK_N=BLOCK_N,
        MASK="all", CAUSAL=False, WINDOW=WINDOW, TMA=False,
    )  # fmt: skip
    if split == used - 1:
        new_keys = norm_and_turn(
            new_x, new_y, k_x, k_y, c_new, s_new, eps, D=D, NORM=NORM, ONE_PLUS=ONE_PLUS
        )
        at_new = (slot // P) * block_stride + (slot % P) * slot_stride + kv_head * head_stride
        stored = fresh & (slot >= 0)[:, None]
        tl.store(k_cache + at_new[:, None] + d[None, :], new_keys, mask=stored)
        tl.store(v_cache + at_new[:, None] + d[None, :], new_values, mask=stored)
        # As later readers of the cache will see them.
        own_keys = new_keys.to(k_cache.dtype.element_ty).to(query.dtype)
        own_values = new_values.to(v_cache.dtype.element_ty).to(query.dtype)
        own = raw_scores(query, own_keys)
        own = hide(own, new, token, 0, count, CAUSAL=True, WINDOW=WINDOW, TMA=False)
        m, total, acc = fold(own, own_values, m, total, acc, factor)

    weight_sum = tl.where(
        total > 0, total, 1.0
    )  # total 0: a row that sees none of these keys, m = -1e30
    acc = acc * (1.0 / weight_sum)[:, None]
    if not WAIT_FOR_SPLITS:
        at_part = (split * TOKENS + token) * H + head
        part = acc.to(partial.dtype.element_ty)
        tl.store(partial + at_part[:, None] * D + d[None, :], part, mask=real)
        tl.store(lse + at_part, m + tl.log2(weight_sum), mask=token < count)
    elif used == 1:
        at_out = (token * H + head)[:, None] * D + d[None, :]
        tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=real)
    else:
        at_split = (kv_head * SPLITS + split) * (TOKENS * GROUP) + row
        tl.store(partial + at_split[:, None] * D_PAD + d[None, :], acc, mask=real)
        tl.store(lse + at_split, m + tl.log2(weight_sum), mask=token < count)
        tl.debug_barrier()  # all threads' stores first, then one release
        if tl.atomic_add(arrived + kv_head, 1, sem="acq_rel") == used - 1:
            tl.store(arrived + kv_head, 0)  # ready for the next launch
            combine_rows(
                out, partial, lse, kv_head * SPLITS, used, 0, count, kv_head,
                H=H, GROUP=GROUP, QUERIES=TOKENS, D=D, D_PAD=D_PAD, SPLITS_PAD=SPLITS,
            )  # fmt: skip


def fits(tokens: int, layer: LayerSpec) -> bool:
    """Return True if `tokens` tokens of a request, one of them or more, fit this kernel's tile
    for `layer`.
    """
    rows = triton.next_power_of_2(tokens) * (layer.num_heads // layer.num_kv_heads)
    return tokens <= MAX_SMALL_BATCH and rows <= MOST_ROWS and layer.head_dim <= WIDEST


def attend_small_batch(
    given: SingleRequestInputs,
    *,
    workspace: Workspace,
    config: SingleRequestConfig,
    wait_for_all_splits: bool,
) -> SingleRequestSplits:
    """Compute attention of two to eight tokens of one request; rows of padding are not written.

    Launch it behind a projection with `trigger_early=False`, unless `starts_early` is True for the layer.

    wait_for_all_splits: True: `out` is complete. False: the splits stay in the workspace for a
        `HeadCombiner`.
    """
    layer, count = given.layer, len(given.qkv)
    assert fits(count, layer), (
        f"{count} tokens of {layer.num_heads} heads do not fit into a tile"
    )
    tokens = triton.next_power_of_2(count)
    rows = config.splits * tokens * layer.num_heads
    assert workspace.rows >= rows, (
        f"the workspace has {workspace.rows} rows, but {rows} are needed"
    )
    block = max(16, triton.next_power_of_2(tokens * layer.num_heads // layer.num_kv_heads))
    return launch(
        small_batch_attention_kernel,
        given,
        workspace,
        config,
        wait_for_all_splits,
        TOKENS=tokens,
        BLOCK_M=block,
    )
