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

    pool: keys and values. num_heads: query heads.
    start: starts a step, given its batch; returns the batch with the tables and slots of each group.
    decodes: True if every request of the step computes one token.

    Its kernels begin at the first block in a layer's window, so they never read freed blocks.
    """

    pool: HybridPool

    def __init__(self, pool: HybridPool, num_heads: int) -> None:
        super().__init__(pool, num_heads)

        self.start: Callable[[PagedBatch], list[PagedBatch]] = pool.begin

    def begin(self, batch: Batch) -> None:
        """Start a step: look up the blocks of its batch in every KV cache group, and plan its kernel
        launches.
        """
        super().begin(batch)
        self.batches = self.start(self.batch)
        self.decodes = bool((self.batch.host.query_lens == 1).all())

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step of a CUDA graph, given its batch, whose requests the caller has sorted.

        members: indices of the requests for the decode kernel; None: none. tiles: query tiles for the prefill
            kernel.
        """
        super().begin_sorted(batch, members, tiles)
        self.batches = self.start(batch)
        self.decodes = False

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's blocks, and the step's slots `[T]` in them, to which tokens' keys are written.

        It also switches `batch` to the block tables of the layer's group.
        """
        self.batch = self.batches[self.pool.group_of[layer.index]]
        return self.pool.layers[layer.index], self.batch.slots
