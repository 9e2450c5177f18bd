"""Paged attention for layers in several KV cache groups, each with block tables of its own."""

from __future__ import annotations

from torch import Tensor

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.pool import HybridPool
from hybrid_cache.states.mixer import DeltaInputs, Mixer
from paged_cache.attention import TorchPagedAttention
from paged_cache.pool import LayerBlocks


class PoolMixer(Mixer):
    """A `Mixer` (what computes Gated DeltaNet layers) whose states lie in the attention object's `pool`."""

    pool: HybridPool

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Return the outputs `[T, H, Dv]` of a Gated DeltaNet layer, and update its states in the pool.

        inputs: of the layer for the batch's `T` tokens: queries, keys and values, decays, and write
            strengths.
        """
        assert self.pool.states is not None
        return self.pool.states.mix(inputs)


class GroupedTorch(TorchPagedAttention, PoolMixer):
    """Paged attention in plain torch for several KV cache groups: each has its own block tables and slots.

    A block that a sliding window has freed reads as zeros, from the null block; the mask excludes it anyway.
    """

    pool: HybridPool

    def begin(self, batch: Batch) -> None:
        """Start a step: look up the block tables and slots of its batch in every KV cache group.

        `place` then sets the tables, and returns the slots, of a layer's group.
        """
        super().begin(batch)
        self.batches = self.pool.begin(self.batch)
        found = [(plan, self.pool.tables_of(pages)) for plan, pages in self._others]
        self._tables = [
            [(plan, blocks[g]) for plan, blocks in found] for g in range(len(self.batches))
        ]

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's blocks, and the slots `[T]` that the step's keys and values are written to.

        Also set `self.batch` to the step's batch with the block tables of the layer's KV cache group.
        """
        group = self.pool.group_of[layer.index]
        self.batch, self._others = self.batches[group], self._tables[group]
        return self.pool.layers[layer.index], self.batch.slots
