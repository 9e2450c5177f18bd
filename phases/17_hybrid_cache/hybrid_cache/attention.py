"""Attention whose layers read through the block table of their group."""

from __future__ import annotations

from torch import Tensor

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.pool import HybridPool
from hybrid_cache.states.mixer import DeltaInputs, Mixer
from paged_cache.attention import TorchPagedAttention
from paged_cache.pool import LayerBlocks


class PoolMixer(Mixer):
    """A `Mixer` over the states that lie in the pool of an attention object."""

    pool: HybridPool

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Return the outputs `[T, H, Dv]` of a Gated DeltaNet layer, and update its states in the pool.

        inputs: queries, keys, values, decays and weights of the layer for `T` tokens.
        """
        assert self.pool.states is not None
        return self.pool.states.mix(inputs)


class GroupedTorch(TorchPagedAttention, PoolMixer):
    """Paged attention in plain torch for several KV cache groups: each has its own block tables and slots.

    A block that a sliding window has freed reads as zeros, from the null block; the mask excludes it anyway.
    """

    pool: HybridPool

    def begin(self, batch: Batch) -> None:
        """Start a step: look up the blocks of its batch in every KV cache group, for the calls of `place`
        that follow.
        """
        super().begin(batch)
        self.batches = self.pool.begin(self.batch)
        found = [(plan, self.pool.tables_of(pages)) for plan, pages in self._others]
        self._tables = [
            [(plan, blocks[g]) for plan, blocks in found] for g in range(len(self.batches))
        ]

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's blocks, and the step's slots `[T]` in them, to which tokens' keys are written.

        It also switches `batch` to the block tables of the layer's group.
        """
        group = self.pool.group_of[layer.index]
        self.batch, self._others = self.batches[group], self._tables[group]
        return self.pool.layers[layer.index], self.batch.slots
