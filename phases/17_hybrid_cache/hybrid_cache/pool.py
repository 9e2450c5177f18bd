"""The device's KV blocks, each of which serves any group of layers, and its table of blocks by page."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.models.config import ModelConfig
from continuous.batch import upload
from hybrid_cache.cache import Moves, page_count
from hybrid_cache.groups import LayerGroups
from hybrid_cache.states.manager import slot_count
from hybrid_cache.states.pool import StatePool
from paged_cache.attention import PagedBatch
from paged_cache.pool import BlockPool, KVFormat


class HybridPool(BlockPool):
    """The device's KV blocks for layers in groups: `[size, 2, N, P, KH, D]`, where a block serves any group.

    `size` layers, keys and values, `N` blocks of `P` tokens, `KH` heads of size `D`.
    config: the model's. blocks: number of blocks of all layers that would fit the memory. block_size: tokens
        of a block. kv: format of quantized keys and values; None: not quantized.
    layout: groups of layers, of `size` each. rows, max_len: most running requests, and most tokens of
        each.

    A step's block tables hold pages (numbers for `block_size` tokens, the same for all groups). `begin` looks
    up each group's blocks in `page_blocks` on the device. `page_blocks` has a fixed address, so CUDA graphs
    that were captured with one block table serve several groups.

    group_of: by layer, the number of its group.
    null: number of the last block, which is all zeros.
    page_blocks: `[groups, pages]` int32, the block of each page in each group, or `null`.
    states: tensors of the layers that keep states; None: there are none.
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
        positions = [0] * config.num_layers
        for group, layers in enumerate(layout.groups):
            for place, layer in enumerate(layers):
                self.group_of[layer], positions[layer] = group, place
        self.layers = [inside[place] for place in positions]
        if kv.scales is not None:
            scales = kv.scales.to(device, torch.float32)
            self.layers = [
                layer._replace(k_scale=s[0], v_scale=s[1])
                for layer, s in zip(self.layers, scales, strict=True)
            ]
        pages = page_count(layout, count, rows, -(-max_len // block_size))
        shape = (len(layout.groups), pages)
        self.page_blocks = torch.full(shape, self.null, dtype=torch.int32, device=device)
        self.states: StatePool | None = None
        if layout.states is not None:
            slots = slot_count(rows)
            self.states = StatePool(
                layout.states, slots, pages, block_size, device=device, dtype=dtype
            )

    def regroup(self, moves: Moves) -> None:
        """Write changed pages' blocks and state slots (`moves`) to the device before the next step."""
        moved = upload(self.page_blocks.device, {"pages": moves.pages, "blocks": moves.blocks})
        pages, blocks = moved["pages"], moved["blocks"]
        self.page_blocks[:, pages] = blocks[: len(self.page_blocks)]
        if self.states is not None:
            self.states.page_slots[pages], self.states.page_tokens_after[pages] = blocks[
                len(self.page_blocks) :
            ]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks on the device, one (source, target) pair each.

        A number n > `null` means state slot n - null - 1.
        """
        if self.states is not None:
            slots = torch.tensor(
                [pair for pair in pairs if pair[0] > self.null], device=self.data.device
            )
            self.states.copy(*(slots - self.null - 1).unbind(1))
            pairs = [pair for pair in pairs if pair[0] <= self.null]
        super().copy(pairs)

    def begin(self, batch: PagedBatch) -> list[PagedBatch]:
        """Start a step: return its batch once for each KV cache group, with the group's tables and slots.

        batch: its block tables `[B, pages]` and slots `[T]` are of pages; the returned ones are of blocks.
        """
        if self.states is not None:
            self.states.begin(batch)
        tables, slots = self.tables_of(batch.block_tables), batch.slots
        blocks = self.tables_of(slots.clamp(min=0) // self.block_size).long()
        in_groups = blocks * self.block_size + slots % self.block_size
        slots = torch.where(slots < 0, slots, in_groups)  # [groups, T]; -1 (none) stays
        return [
            replace(batch, block_tables=t, slots=s) for t, s in zip(tables, slots, strict=True)
        ]

    def tables_of(self, pages: Tensor) -> Tensor:
        """Return the block numbers `[groups, ...]` int32 of page numbers `[...]`, for each KV cache group."""
        return self.page_blocks.index_select(1, pages.flatten()).view(-1, *pages.shape)
