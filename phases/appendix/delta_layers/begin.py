"""The begin of a step in one kernel: tables of all groups, slots of all tokens, and where states lie."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from hybrid_cache.pool import HybridPool
from paged_cache.attention import PagedBatch


@triton.jit
def begin_kernel(
    tables, slots, step, page_tables, page_slots, query_starts, context_lens, blocks, states, tails,
    requests, tokens, width, pages, null,
    P: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request or token: `HybridPool.begin` and `StatePool.begin`."""
    at = tl.program_id(0)
    if at < tokens:
        slot = tl.load(page_slots + at)
        page = tl.maximum(slot, 0) // P
        for kind in range(KINDS):
            block = tl.load(blocks + kind * pages + page).to(tl.int64)
            tl.store(slots + kind * tokens + at, tl.where(slot < 0, slot, block * P + slot % P))
    if at < requests:
        table = page_tables + at.to(tl.int64) * width
        for first in range(0, width, BLOCK):
            i = first + tl.arange(0, BLOCK)
            page = tl.load(table + i, mask=i < width, other=0)
            for kind in range(KINDS):
                to = tables + (kind * requests + at).to(tl.int64) * width + i
                tl.store(to, tl.load(blocks + kind * pages + page), mask=i < width)
        end = tl.load(context_lens + at)
        count = tl.load(query_starts + at + 1) - tl.load(query_starts + at)
        last = tl.load(table + tl.maximum(end - 1, 0) // P)
        tail = tl.load(tails + last)
        cut, start = count - tl.abs(tail), end - count
        source = tl.load(states + tl.load(table + tl.maximum(start - 1, 0) // P))
        boundary = tl.load(states + tl.load(table + tl.maximum(start + cut - 1, 0) // P))
        saves = (count > 1) & (end > 0) & (tail != 0) & (boundary != null)
        into = tl.where((count > 1) & (tail < 0), null + 1, tl.load(states + last))
        tl.store(step + at, tl.where(start > 0, source, null))
        tl.store(step + requests + at, tl.where(saves, boundary, -1))
        tl.store(step + 2 * requests + at, tl.where((count > 0) & (end > 0), into, -1))
        tl.store(step + 3 * requests + at, tl.where(saves, cut, 0))


def begin(pool: HybridPool, batch: PagedBatch) -> list[PagedBatch]:
    """See `HybridPool.begin`; the pool has states."""
    states, kinds, tokens = pool.states, len(pool.places), len(batch.slots)
    assert states is not None
    requests, width = batch.block_tables.shape
    tables = batch.block_tables.new_empty(kinds, requests, width)
    slots = batch.slots.new_empty(kinds, tokens)
    states.start(batch, pool.places.new_empty(4, requests))
    begin_kernel[(max(requests, tokens),)](
        tables, slots, states.step, batch.block_tables, batch.slots, batch.query_starts,
        batch.context_lens, pool.places, states.places, states.tails,
        requests, tokens, width, pool.places.shape[1], states.null,
        P=pool.block_size, KINDS=kinds, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return [replace(batch, block_tables=t, slots=s) for t, s in zip(tables, slots, strict=True)]
