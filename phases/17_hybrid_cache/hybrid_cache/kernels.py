"""Phase 06's kernels for groups of layers, inside graphs and outside of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.mixer import DeltaInputs, Mixer
from hybrid_cache.pool import HybridPool
from paged_cache.attention import PagedBatch
from paged_cache.pool import LayerBlocks
from triton_paged_attention.attention import TritonPagedAttention


class GroupedTriton(TritonPagedAttention, Mixer):
    """`TritonPagedAttention` for groups: planned once a step; each group has its tables and slots.

    Its kernels begin at the first block in a layer's window, so they never read what was given back.

    decodes: True if every request of the step computes one token.
    """

    pool: HybridPool

    def __init__(self, pool: HybridPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        self._torch = GroupedTorch(pool)

    def begin(self, batch: Batch) -> None:
        """See `PagedAttention.begin`."""
        super().begin(batch)
        self.batches = begin(self.pool, self.batch)
        self.decodes = bool((self.batch.host.query_lens == 1).all())

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """See `TritonPagedAttention.begin_sorted`."""
        super().begin_sorted(batch, members, tiles)
        self.batches = begin(self.pool, batch)
        self.decodes = False

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """See `PagedAttention.place`; from here on the step is that of the layer's group."""
        self.batch = self.batches[self.pool.group_of[layer.index]]
        if self._needs_torch:
            self._torch.place(layer)
        return self.pool.layers[layer.index], self.batch.slots

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """See `Mixer.mix`; layers over kernels do not call it."""
        assert self.pool.states is not None
        return self.pool.states.mix(inputs)


@triton.jit
def begin_kernel(
    tables, slots, step, page_tables, page_slots, query_starts, context_lens, blocks, states, tails,
    requests, tokens, width, pages, null,
    P: tl.constexpr, KINDS: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
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
        if STATES:
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
    """See `HybridPool.begin`: one kernel in the place of some forty."""
    states, kinds, tokens = pool.states, len(pool.places), len(batch.slots)
    requests, width = batch.block_tables.shape
    tables = batch.block_tables.new_empty(kinds, requests, width)
    slots = batch.slots.new_empty(kinds, tokens)
    own: tuple[Tensor, Tensor] = (pool.places, pool.places)
    step = pool.places
    if states is not None:
        own = states.places, states.tails
        step = states.step = pool.places.new_empty(4, requests)
        states.batch, states._on_host = batch, None
    begin_kernel[(max(requests, tokens),)](
        tables, slots, step, batch.block_tables, batch.slots, batch.query_starts,
        batch.context_lens, pool.places, *own, requests, tokens, width, pool.places.shape[1],
        0 if states is None else states.null,
        P=pool.block_size, KINDS=kinds, STATES=states is not None, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return [replace(batch, block_tables=t, slots=s) for t, s in zip(tables, slots, strict=True)]
