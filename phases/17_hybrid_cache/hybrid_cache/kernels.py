"""Phase 06's kernels for groups of layers, inside graphs and outside of them."""

from __future__ import annotations

from typing import Any

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
        self.batches = self.pool.begin(self.batch)
        self.decodes = bool((self.batch.host.query_lens == 1).all())

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """See `TritonPagedAttention.begin_sorted`."""
        super().begin_sorted(batch, members, tiles)
        self.batches = self.pool.begin(batch)
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
