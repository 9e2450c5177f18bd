"""Attention whose layers read through the block table of their group."""

from __future__ import annotations

from torch import Tensor

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.mixer import DeltaInputs, Mixer
from hybrid_cache.pool import HybridPool
from paged_cache.attention import TorchPagedAttention
from paged_cache.pool import LayerBlocks


class GroupedTorch(TorchPagedAttention, Mixer):
    """`TorchPagedAttention` for groups: planned once a step; each group has its tables and slots.

    What a window has given back reads as zeros, from the null block; its mask excludes it in any case.
    """

    pool: HybridPool

    def begin(self, batch: Batch) -> None:
        """See `PagedAttention.begin`."""
        super().begin(batch)
        self.batches = self.pool.begin(self.batch)
        found = [(plan, self.pool.tables_of(pages)) for plan, pages in self._others]
        self._tables = [
            [(plan, blocks[g]) for plan, blocks in found] for g in range(len(self.batches))
        ]

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """See `PagedAttention.place`; from here on the step is that of the layer's group."""
        group = self.pool.group_of[layer.index]
        self.batch, self._others = self.batches[group], self._tables[group]
        return self.pool.layers[layer.index], self.batch.slots

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """See `Mixer.mix`."""
        assert self.pool.states is not None
        return self.pool.states.mix(inputs)
