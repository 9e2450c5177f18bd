"""The pool whose blocks serve any group of layers, and the device's copy of where each page's blocks are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.models.config import ModelConfig
from continuous.batch import upload
from hybrid_cache.cache import Moves, page_count
from hybrid_cache.layout import LayerGroups
from hybrid_cache.state import slot_count
from hybrid_cache.state_pool import StatePool
from paged_cache.attention import PagedBatch
from paged_cache.pool import BlockPool, KVFormat


class HybridPool(BlockPool):
    """Blocks of `LayerGroups.size` layers, `[size, 2, N, P, KH, D]`: the `i`-th is the `i`-th of any group.

    Graphs read `places` at a fixed address, so all that was made for one table works for many: a step's
    block tables name pages, and `begin` looks up each group's blocks on the device.

    Args:
        config, block_size, device, dtype, kv: see `BlockPool`.
        blocks: as many as the memory would hold of all layers.
        layout: groups of layers.
        rows, max_len: requests that run at most, and their tokens.

    group_of: by layer.
    null: the last block, of zeros.
    places: `[groups, pages]` int32, the block of each page in each group, or `null`.
    states: of the layers that are in no group; None: there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv: KVFormat | None = None,
        layout: LayerGroups,
        rows: int,
        max_len: int,
    ) -> None:
        kv = kv or KVFormat()
        count = layout.blocks(blocks)
        one = replace(config, num_layers=layout.size, sliding_windows=(), delta=None)
        super().__init__(
            one, count, block_size, device=device, dtype=dtype, kv=replace(kv, scales=None)
        )
        self.exact = kv.exact(dtype)
        self.block_size = block_size
        self.null = count - 1
        inside = self.layers
        self.group_of = [0] * config.num_layers
        places = [0] * config.num_layers
        for group, layers in enumerate(layout.groups):
            for place, layer in enumerate(layers):
                self.group_of[layer], places[layer] = group, place
        self.layers = [inside[place] for place in places]
        if kv.scales is not None:
            scales = kv.scales.to(device, torch.float32)
            self.layers = [
                layer._replace(k_scale=s[0], v_scale=s[1])
                for layer, s in zip(self.layers, scales, strict=True)
            ]
        pages = page_count(layout, count, rows, -(-max_len // block_size))
        shape = (len(layout.groups), pages)
        self.places = torch.full(shape, self.null, dtype=torch.int32, device=device)
        self.states: StatePool | None = None
        if layout.states is not None:
            slots = slot_count(rows)
            self.states = StatePool(
                layout.states, slots, pages, block_size, device=device, dtype=dtype
            )

    def regroup(self, moves: Moves | None) -> None:
        """Note where pages have their blocks now, before the step that reads it."""
        if moves is None:
            return
        moved = upload(self.places.device, {"pages": moves.pages, "blocks": moves.blocks})
        pages, blocks = moved["pages"], moved["blocks"]
        self.places[:, pages] = blocks[: len(self.places)]
        if self.states is not None:
            self.states.places[pages], self.states.tails[pages] = blocks[len(self.places) :]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, and slots, which are numbered behind them."""
        if self.states is not None:
            slots = torch.tensor(
                [pair for pair in pairs if pair[0] > self.null], device=self.data.device
            )
            self.states.copy(*(slots - self.null - 1).unbind(1))
            pairs = [pair for pair in pairs if pair[0] <= self.null]
        super().copy(pairs)

    def begin(self, batch: PagedBatch) -> list[PagedBatch]:
        """Start a step; returns its batch for each group: its block tables, and the slots of its tokens."""
        if self.states is not None:
            self.states.begin(batch)
        tables, slots = self.tables_of(batch.block_tables), self.slots_of(batch.slots)
        return [
            replace(batch, block_tables=t, slots=s) for t, s in zip(tables, slots, strict=True)
        ]

    def tables_of(self, pages: Tensor) -> Tensor:
        """Pages `[...]` -> blocks `[groups, ...]` int32."""
        return self.places.index_select(1, pages.flatten()).view(-1, *pages.shape)

    def slots_of(self, slots: Tensor) -> Tensor:
        """Slots in pages `[T]` -> in blocks, `[groups, T]`; -1, which is nowhere, stays."""
        blocks = self.tables_of(slots.clamp(min=0) // self.block_size).long()
        return torch.where(
            slots < 0, slots, blocks * self.block_size + slots % self.block_size
        )
