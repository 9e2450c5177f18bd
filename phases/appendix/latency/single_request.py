"""Attention of a single request's one token, from the QKV projection's output to the output projection's
input.

With one token, time is spent not on work but on waiting: every kernel waits for the one before, and every
load for the address it depends on. So head norms, RoPE, KV store and attention are one kernel, and all that
does not depend on the new token is loaded before the wait: lengths, block ids, and each split's last tile
of keys and values. The newest key and value come from registers, so no load from the cache has to wait for
them.

A split writes its part of the output and the logarithm of its weight. Two kernels can combine the parts:
- `project_heads`: every program of the output projection combines them before its product. No program waits
for the last split, but each reads all parts: right while these are small beside the program's rows.
- Otherwise the last split to arrive combines them, as in `decode.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from forward.attention import LayerSpec
from phases.appendix.latency.tables import SingleRequestConfig, single_request_default
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import Workspace
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.rope import (
    HeadNorms,
    apply_norm_weight,
    norm_scale,
    rotate,
)
from triton_paged_attention.tiles import (
    LOG2_E,
    attend,
    combine,
    fold,
    load_tile,
    lookup,
    no_keys,
    padded,
    raw_scores,
)

LOG_STEP = tl.constexpr(2)
"""Distance between the logarithms of neighbouring heads. At distance 1 the compiler would give a thread
several heads, to load them at once, and would have to shuffle them before it can use them.
"""


@triton.jit
def splits_of(
    position, end, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr
):
    """Return how the keys are split: (first key, tiles of a split, number of splits with work).

    The splits share the keys before `end` that a query at `position` sees. At least one has work, even if
    there is no key. WINDOW: tokens that a query sees; 0: all. BLOCK_N: keys of a tile. SPLITS: most splits.
    """
    begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
    tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_N), 1)
    tiles_per_split = tl.cdiv(tiles, SPLITS)
    return begin, tiles_per_split, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def norm_and_turn(
    x, y, w_x, w_y, cos, sin, eps, D: tl.constexpr
):  # fmt: skip
    """Return heads `x [rows, D_PAD]` normalized and rotated by RoPE, in `x`'s dtype.

    y: `[rows, D_PAD]`, each number's partner in the rotation, half a head away. w_x, w_y, eps: the norm's
        weights for `x` and `y`, and its epsilon; None: there is no norm. cos, sin: `[1, D_PAD]`, the first
        half of `sin` with a minus sign.
    """
    if w_x is not None:
        full = x.to(tl.float32)
        scale = norm_scale(tl.sum(full * full, axis=1), eps, D)[:, None]
        x = apply_norm_weight(x, scale, w_x)
        y = apply_norm_weight(y, scale, w_y)
    return rotate(x, y, cos, sin)


@triton.jit
def load_head(head, at, d, D: tl.constexpr):
    """Load the numbers at offsets `at [D_PAD]` of one head: `[1, D_PAD]`, 0 in the padding.

    head: pointer to the head's first number. d: `arange(D_PAD)`; those from D on are padding.
    """
    return tl.load(head + at, mask=d < D, other=0.0)[None, :]


@triton.jit
def single_request_attention_kernel(
    out,  # [H, D]
    qkv, cos, sin, q_weight, k_weight, k_cache, v_cache, block_table, context_len, slots,
    partial, lse, arrived, eps, scale, block_stride, slot_stride, head_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WAIT_FOR_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of one token over one split of the keys. One program per key/value head and split.

    A program computes the query heads that share its key/value head. The program of the last split also
    normalizes, rotates and stores the new token's key and value.

    out: `[H, D]`. qkv: `[(H + 2 KH) D]`, the projection's output.
    cos, sin: `[D]`. q_weight, k_weight, eps: of the head norms, `[D]`, or None. scale: of the scores.
    k_cache, v_cache: the layer's blocks; strides in numbers. block_table: `[max_blocks]`.
    context_len, slots: `[1]`, number of tokens, and where the new one is stored; slot -1: it is not stored.
    partial, lse, arrived: the workspace: the splits' outputs, log2 of their sums of softmax weights, counters
        of splits that have ended.
    H, KH: query and key/value heads. P: tokens of a block. WINDOW, BLOCK_N, SPLITS: see `splits_of`.
    WAIT_FOR_SPLITS: the split that ends last combines all into `out`; otherwise they stay in the workspace.
    PDL: programmatic dependent launch is on.
    """
    GROUP: tl.constexpr = H // KH
    BLOCK_M: tl.constexpr = padded(GROUP)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_len)
    newest = context - 1
    begin, tiles_per_split, used = splits_of(newest, context, WINDOW, BLOCK_N, SPLITS)
    if split >= used:
        return
    low = begin + split * tiles_per_split * BLOCK_N
    high = tl.minimum(low + tiles_per_split * BLOCK_N, context)
    # Where its last tile begins.
    last = low + (tl.maximum(tl.cdiv(high - low, BLOCK_N), 1) - 1) * BLOCK_N

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    key = last + n
    block = lookup(block_table, last, newest, n, P, BLOCK_N)
    known = tl.minimum(high, newest)
    keys, values = load_tile(
        k_cache, v_cache, block, last, key, known, kv_head, block_stride, slot_stride,
        head_stride,
        D=D, D_PAD=D_PAD, P=P, BLOCK_N=BLOCK_N, BOUNDED=True,
    )  # fmt: skip

    # Rows 0 to GROUP - 1 are the query heads of this key/value head; the newest key is a row by itself.
    row = tl.arange(0, BLOCK_M)
    partner = (d + D // 2) % D  # the other number of each rotated pair, half a head away
    real = (row < GROUP)[:, None] & (d < D)[None, :]
    at_q = (kv_head * GROUP + row)[:, None] * D
    at_k = (H + kv_head) * D
    c = load_head(cos, d, d, D)
    s = load_head(sin, d, d, D)  # its first half carries the minus sign
    q_x = None
    q_y = None
    k_x = None
    k_y = None
    if q_weight is not None:
        q_x = load_head(q_weight, d, d, D)
        q_y = load_head(q_weight, partner, d, D)
        k_x = load_head(k_weight, d, d, D)
        k_y = load_head(k_weight, partner, d, D)
    slot = tl.load(slots)
    if PDL:
        gdc_wait()

    x = tl.load(qkv + at_q + d[None, :], mask=real, other=0.0)
    y = tl.load(qkv + at_q + partner[None, :], mask=real, other=0.0)
    new_x = load_head(qkv + at_k, d, d, D)
    new_y = load_head(qkv + at_k, partner, d, D)
    new_value = load_head(qkv + at_k + KH * D, d, d, D)
    if PDL:  # not before: the weights that the next kernel reads would delay what this one waits for
        gdc_launch_dependents()
    query = norm_and_turn(x, y, q_x, q_y, c, s, eps, D)
    # [1, D]
    new_key = norm_and_turn(new_x, new_y, k_x, k_y, c, s, eps, D)
    if (split == used - 1) & (slot >= 0):
        at_new = (
            (slot // P) * block_stride
            + (slot % P) * slot_stride
            + kv_head * head_stride
            + d[None, :]
        )
        tl.store(k_cache + at_new, new_key, mask=(d < D)[None, :])
        tl.store(v_cache + at_new, new_value, mask=(d < D)[None, :])

    m, total, acc = no_keys(BLOCK_M, D_PAD)
    # The newest key and value as later readers of the cache will see them.
    new_key = new_key.to(k_cache.dtype.element_ty).to(query.dtype)
    new_value = new_value.to(v_cache.dtype.element_ty).to(query.dtype)
    keys = tl.where((key == newest)[:, None], new_key, keys.to(query.dtype))
    values = tl.where((key == newest)[:, None], new_value, values.to(query.dtype))
    scores = raw_scores(query, keys)
    visible = key < high
    if WINDOW > 0:
        visible = visible & (key > newest - WINDOW)
    scores = tl.where(visible[None, :], scores, float("-inf"))
    m, total, acc = fold(scores, values, m, total, acc, scale * LOG2_E)
    # What comes before that tile is in the cache; with a window, its edge may run through the first tile.
    m, total, acc = attend(
        query, newest + row * 0, m, total, acc, k_cache, v_cache, block_table, kv_head, low,
        last, last,
        scale, block_stride, slot_stride, head_stride, D=D, P=P,
        BLOCK_N=BLOCK_N,
        MASK="all" if WINDOW > 0 else "none", CAUSAL=WINDOW > 0, WINDOW=WINDOW,
        TMA=False,
    )  # fmt: skip

    weight_sum = tl.where(total > 0, total, 1.0)
    acc = acc * (1.0 / weight_sum)[:, None]
    head = kv_head * GROUP + row
    if WAIT_FOR_SPLITS and used == 1:
        tl.store(out + head[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=real)
    else:
        at_part = split * H + head
        part = acc.to(partial.dtype.element_ty)
        tl.store(partial + at_part[:, None] * D_PAD + d[None, :], part, mask=real)
        log = m + tl.log2(weight_sum)
        step = 1 if WAIT_FOR_SPLITS else LOG_STEP
        tl.store(lse + at_part * step, log, mask=row < GROUP)
        if WAIT_FOR_SPLITS:
            tl.debug_barrier()  # all threads' stores first, then one release
            if tl.atomic_add(arrived + kv_head, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + kv_head, 0)  # ready for the next launch
                # Only the program of the split that ends last comes here: it combines all.
                member = tl.arange(0, triton.next_power_of_2(GROUP))
                every = tl.arange(0, SPLITS)
                filled = (every < used)[:, None] & (member < GROUP)[None, :]
                at_splits = every[:, None] * H + (kv_head * GROUP + member)[None, :]
                mixed = combine(partial, lse, at_splits, filled, d, D, D_PAD)
                at_out = (kv_head * GROUP + member)[:, None] * D + d[None, :]
                keep = (member < GROUP)[:, None] & (d < D)[None, :]
                tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=keep)


class SingleRequestSplits(NamedTuple):
    """Attention's output for a single request's token, combined or still in splits.

    out: `[1, H D]`; valid only if attention has combined the splits.
    workspace: float32; if `out` is not valid, the splits (attention over some keys each) to be combined.
    layer: the attention layer. context_lens: `[1]`, the request's tokens. config: the kernel's block sizes.
    """

    out: Tensor
    layer: LayerSpec
    context_lens: Tensor
    workspace: Workspace
    config: SingleRequestConfig


def single_request_workspace(layer: LayerSpec, device: torch.device | str) -> Workspace:
    """Allocate and return memory for the splits of a layer's attention over the keys.

    Layers with the same heads may share it, one after the other.
    """
    d_pad = padded(layer.head_dim)
    return Workspace(2 * layer.num_heads * SingleRequestConfig.splits, d_pad, device)


def attend_step(
    attention: TritonPagedAttention,
    layer: LayerSpec,
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    *,
    workspace: Workspace,
    wait_for_all_splits: bool,
    config: SingleRequestConfig | None = None,
) -> SingleRequestSplits:
    """Compute attention for a step of one token over the KV cache; store the token's key and value.

    Args:
        attention: the engine's, with the KV cache. layer: sizes and index of the layer.
        qkv: `[1, (H + 2 KH) D]`, the projection's output. cos_sin: RoPE's, `[D]` float32 each.
        norms: of queries and keys, or None.
        workspace: memory for splits (attention over some of the keys each).
        wait_for_all_splits: True: the result's `out` is complete; False: the splits stay in the workspace for
            `project_heads`.
        config: block sizes; None: the default.

    Launch it after a `gemv` with `trigger_early=False`, unless all that attention reads before it waits for
    the projection is complete: the KV cache and the step's lengths. After the first layer they are, since its
    attention lets no kernel start early.
    """
    cache, slots = attention.place(layer)
    batch = attention.batch
    assert not cache.scaled, "new keys and values are stored by a kernel that knows no scales"
    heads = layer.num_heads
    kv_heads = layer.num_kv_heads
    d = layer.head_dim
    d_pad = padded(d)
    config = config or single_request_default(
        kv_heads, d_pad, cache.k.element_size(), qkv.device
    )
    out = torch.empty(1, heads * d, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    partial = workspace.partial if wait_for_all_splits else workspace.partial.view(qkv.dtype)
    single_request_attention_kernel[(kv_heads, config.splits)](
        out, qkv, *cos_sin, q_weight, k_weight, cache.k, cache.v, batch.block_tables,
        batch.context_lens, slots,
        partial, workspace.lse, workspace.arrived,
        eps, layer.scale, *cache.k.stride()[:3],
        H=heads, KH=kv_heads, D=d, D_PAD=d_pad,
        P=cache.k.shape[1], WINDOW=layer.sliding_window or 0,
        BLOCK_N=config.block_n, SPLITS=config.splits,
        WAIT_FOR_SPLITS=wait_for_all_splits, num_warps=4, num_stages=1,
        **dependent_launch(qkv.device),
    )  # fmt: skip
    return SingleRequestSplits(out, layer, batch.context_lens, workspace, config)
