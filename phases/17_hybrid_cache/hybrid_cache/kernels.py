"""Phase 06's attention kernels over the block tables of several groups of layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.attention import PoolMixer
from hybrid_cache.pool import HybridPool
from paged_cache.attention import PagedBatch
from paged_cache.pool import LayerBlocks
from triton_paged_attention.attention import TritonPagedAttention


class GroupedTriton(TritonPagedAttention, PoolMixer):
    """Paged attention by Triton for several KV cache groups: planned once a step, with each group's tables
    and slots.

    pool: blocks of keys and values. num_heads: number of query heads.
    start: looks up a batch in every group; returns a list with the batch once for each group, with the
        group's block tables and slots.
    decodes: True if every request of the step computes one token.

    The kernels begin at the first block in a layer's window, so they never read freed blocks.
    """

    pool: HybridPool

    def __init__(self, pool: HybridPool, num_heads: int) -> None:
        super().__init__(pool, num_heads)

        self.start: Callable[[PagedBatch], list[PagedBatch]] = pool.begin

    def begin(self, batch: Batch) -> None:
        """Start a step: plan its kernel launches, and look up its block tables in every KV cache group."""
        super().begin(batch)
        self.batches = self.start(self.batch)
        self.decodes = bool((self.batch.host.query_lens == 1).all())

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step of a CUDA graph whose requests the caller has sorted into decodes and prefills.

        members: indices of the requests for the decode kernel; None: none. tiles: `[n, 4]` int32, pieces of
            the other requests' tokens for the prefill kernel: request, first token, count, position.
        """
        super().begin_sorted(batch, members, tiles)
        self.batches = self.start(batch)
        self.decodes = False

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's blocks, and the slots `[T]` that the step's keys and values are written to.

        Also set `self.batch` to the step's batch with the block tables of the layer's KV cache group.
        """
        self.batch = self.batches[self.pool.group_of[layer.index]]
        return self.pool.layers[layer.index], self.batch.slots
