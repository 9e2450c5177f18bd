"""Device functions that every attention kernel of this package shares."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""The scale times it is the factor from raw scores to exponents of 2: the GPU computes 2**x, not e**x."""


@triton.constexpr_function
def padded(size: int) -> int:
    """Return the tile size for `size` rows or a head of `size` numbers: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def raw_scores(q, keys):
    """Return the scores of a tile, not multiplied by the scale yet: `q [M, D]`, `keys [N, D]` -> `[M, N]`.

    The product's precision "ieee" keeps float32 inputs from being rounded to tf32, and changes nothing for
    half precision.
    """
    return tl.dot(q, tl.trans(keys), input_precision="ieee")


@triton.jit
def no_keys(ROWS: tl.constexpr, D_PAD: tl.constexpr):
    """Return the state of the online softmax of rows that have seen no key: `m`, `total` and `acc`.

    m, total: `[ROWS]` float32, the largest score and the softmax's sum. acc: `[ROWS, D_PAD]` float32, the
    output, not yet divided by `total`.
    """
    total = tl.zeros([ROWS], tl.float32)
    return tl.full([ROWS], -1.0e30, tl.float32), total, tl.zeros([ROWS, D_PAD], tl.float32)


@triton.jit
def fold(s, values, m, total, acc, factor):
    """Fold a tile of keys into the online softmax, and return its new `m`, `total` and `acc`.

    m, total: `[M]`, the largest score (times `factor`) and the softmax's sum. acc: `[M, D]`, the output, not
        yet divided by `total`.
    s: raw scores `[M, N]`. values: `[N, D]`. factor: the score scale times log2(e), since exponents are of
        two. Scaling inside the exponent is one multiply-add per score instead of two operations.
    """
    new_m = tl.maximum(m, tl.max(s, axis=1) * factor)
    shrink = tl.exp2(m - new_m)
    p = tl.exp2(s * factor - new_m[:, None])
    # Summed up before the product, which then needs p in half precision only.
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_m, total, acc


@triton.jit
def lookup(table, start, end, n, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block numbers of a tile's keys: `[BLOCK_N]`, or one number if tiles never cross a block.

    table: pointer to the request's block table. start: position of the first key. n: `arange(BLOCK_N)`.
    end: table entries for keys from this position on are not read, since they may hold anything. P: tokens
        of a block.
    """
    if P % BLOCK_N == 0:
        block = tl.load(table + start // P, mask=start < end, other=0)
    else:
        key = start + n
        block = tl.load(table + key // P, mask=key < end, other=0).to(
            tl.int64
        )  # as addresses need it
    return block


@triton.jit
def hide(
    s,
    key,
    position,
    start,
    high,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return scores `s [M, N]` with minus infinity where a row may not see a key.

    key: `[N]`, positions of the keys. position: `[M]`, of each row's token.
    CAUSAL: rows see no later keys; otherwise all rows see the keys before position `high`.
    WINDOW: tokens that a row sees, 0: all. TMA: keys before position `start` are hidden, too.
    """
    visible = key[None, :] <= position[:, None] if CAUSAL else (key < high)[None, :]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    if TMA:
        visible = visible & (key >= start)[None, :]
    return tl.where(visible, s, float("-inf"))


@triton.jit
def load_tile(
    k_cache, v_cache, block, start, key, high, kv_head, block_stride, slot_stride, head_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Load a tile of keys and one of values by pointers, and return them: `[BLOCK_N, D_PAD]` each.

    k_cache, v_cache: pointers to the layer's `[N, P, KH, D]`.
    block: the number of the keys' block, or `[BLOCK_N]` where a tile spans blocks (`lookup` returns it).
    kv_head: the key/value head. start: position of the tile's first key. key: `[BLOCK_N]`, positions of its
        keys.
    Strides: numbers from a block, slot or head to the next. BOUNDED: True to read zeros from key `high` on.
    D_PAD: D rounded up to a power of two. P: tokens of a block.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    if P % BLOCK_N == 0:
        at = block.to(tl.int64) * block_stride + (start % P) * slot_stride + n * slot_stride
    else:
        at = block.to(tl.int64) * block_stride + (key % P) * slot_stride
    at = at[:, None] + kv_head * head_stride + d[None, :]
    mask = (d < D)[None, :]
    if BOUNDED:
        mask = (key < high)[:, None] & mask
    if BOUNDED or D != D_PAD:
        keys = tl.load(k_cache + at, mask=mask, other=0.0)
        values = tl.load(v_cache + at, mask=mask, other=0.0)
    else:
        keys, values = tl.load(k_cache + at), tl.load(v_cache + at)
    return keys, values


@triton.jit
def attend(
    query,  # [M, D]
    position,  # [M]
    m, total, acc,
    k_cache, v_cache,  # pointers to [N, P, KH, D], or TMA descriptors of the same memory, see `describe`
    table, kv_head, low, high, whole, scale, block_stride, slot_stride, head_stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Fold the keys at positions `low` to `high - 1` of a request into an online softmax, and return it.

    query: `[M, D_PAD]`. position: `[M]`, of each row's token.
    m, total: `[M]`, the largest score and the softmax's sum. acc: `[M, D_PAD]`, the output, not yet divided
        by `total`. The new m, total and acc are returned.
    k_cache, v_cache: the layer's blocks; with TMA, descriptors of these. kv_head: the key/value head.
    table: pointer to the request's block table. scale: by which scores are multiplied. P: tokens of a block.
    Strides: numbers from a block, slot (token) or head to the next.
    CAUSAL: True if rows see no later keys. WINDOW: tokens that a row sees; 0: all. TMA: True to load by it.
    MASK: which tiles have keys that a row may not see. "none": `high - low` is a multiple of BLOCK_N, and
        every row sees every key. "edge": this is so up to key `whole`, and only the tiles after it are
        masked. "all": any tile may.

    By TMA, a tile that would reach past `high` is moved back to end there: what lies after it may be
    anything, and 0 times NaN is NaN. Its first keys then are of the tile before, or, before the block's
    beginning, zeros; they are masked.

    The block ids of the next tile are loaded while this one is computed and carried through the loop:
    loaded in the iteration that needs them, they would halve the depth of the pipeline.
    """
    n = tl.arange(0, BLOCK_N)
    factor = scale * LOG2_E
    block = lookup(table, low, high, n, P, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        next_block = lookup(table, start + BLOCK_N, high, n, P, BLOCK_N)
        key = start + n
        if TMA:
            back = tl.maximum(start + BLOCK_N - high, 0) if MASK != "none" else 0
            key -= back
            keys = k_cache.load([block, start % P - back, kv_head * D]).reshape(BLOCK_N, D)
            values = v_cache.load([block, start % P - back, kv_head * D]).reshape(BLOCK_N, D)
        else:
            keys, values = load_tile(
                k_cache, v_cache, block, start, key, high, kv_head, block_stride, slot_stride,
                head_stride,
                D=D, D_PAD=acc.shape[1], P=P, BLOCK_N=BLOCK_N, BOUNDED=MASK != "none",
            )  # fmt: skip
        s = raw_scores(query, keys.to(query.dtype))
        if MASK == "edge":
            if start + BLOCK_N > whole:
                s = hide(s, key, position, start, high, CAUSAL, WINDOW, TMA)
        elif MASK == "all":
            s = hide(s, key, position, start, high, CAUSAL, WINDOW, TMA)
        m, total, acc = fold(s, values.to(query.dtype), m, total, acc, factor)
        block = next_block
    return m, total, acc


@triton.jit
def combine(partial, lse, at, filled, d, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return the combined output `[rows, D_PAD]` of splits of the keys, each weighted by its softmax sum.

    partial: `[n, D_PAD]`, outputs of splits. lse: `[n]`, log2 of their softmax sums.
    at: `[splits, rows]`, which of the n entries belong to a row. filled: `[splits, rows]` bool, which of
        these have been written; others do not count. d: `arange(D_PAD)`.
    All rows are loaded at once, since a loop would wait for each load. The loads use `.cg`: other programs
    have just written these numbers, so they may not come from this multiprocessor's own cache.
    """
    logs = tl.load(
        lse + at, mask=filled, other=-1.0e30, cache_modifier=".cg"
    )  # [splits, rows]
    weight = tl.exp2(logs - tl.max(logs, axis=0)[None, :])
    weight = weight / tl.sum(weight, axis=0)[None, :]
    parts = tl.load(
        partial + at[:, :, None] * D_PAD + d[None, None, :],
        mask=filled[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return tl.sum(parts * weight[:, :, None], axis=0)
