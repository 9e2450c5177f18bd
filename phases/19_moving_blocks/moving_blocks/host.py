"""The second tier, after GPU memory: slots of host memory, reused least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paged_cache.pool import zeros


@dataclass(eq=False, slots=True)
class HostBlock:
    """A KV block in host memory.

    digest: its name, a digest of its tokens and of all before them. slot: the number of its slot.
    loadable: False until its bytes have been read from a file. failed: True if reading has failed.
    pins: number of copies and requests that need it to stay.
    """

    digest: bytes
    slot: int
    loadable: bool = True
    failed: bool = False
    pins: int = 0


class HostTier:
    """Slots of host memory for `count` blocks, found by digest (the block's name).

    memory: `[count, block_bytes]` uint8, page-locked for a GPU: a kernel reads and writes it over the bus.
    """

    def __init__(self, count: int, block_bytes: int, device: torch.device) -> None:
        if device.type == "cuda":
            self.memory = torch.zeros(count, block_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.memory = zeros((count, block_bytes), torch.device("cpu"), torch.uint8)
        self._free = list(range(count - 1, -1, -1))
        self._blocks: dict[bytes, HostBlock] = {}
        self._unpinned: OrderedDict[bytes, HostBlock] = OrderedDict()  # oldest first

    def get(self, digest: bytes) -> HostBlock | None:
        """Return the block with this digest (its name), or None if host memory does not have it."""
        return self._blocks.get(digest)

    def allocate(self, digest: bytes) -> HostBlock | None:
        """Return a new block of this digest with a slot and one pin (one user); None if all slots are pinned.

        A free slot is taken first, then that of the least recently used block without pins, which is lost.
        """
        if self._free:
            slot = self._free.pop()
        elif self._unpinned:
            oldest, block = self._unpinned.popitem(last=False)
            del self._blocks[oldest]
            slot = block.slot
        else:
            return None
        block = self._blocks[digest] = HostBlock(digest, slot, pins=1)
        return block

    def pin(self, blocks: Iterable[HostBlock]) -> None:
        """Add a pin (a user) to each block, so that it stays in its slot until `unpin`."""
        for block in blocks:
            self._unpinned.pop(block.digest, None)
            block.pins += 1

    def unpin(self, blocks: Sequence[HostBlock]) -> None:
        """Remove a pin (a user) from each block; a block without pins stays until its slot is needed.

        blocks: of one sequence in order; its last block is evicted first. A block that could not be read
            gives its slot back with its last pin.
        """
        for block in reversed(blocks):
            block.pins -= 1
            if block.pins:
                continue
            if block.failed:
                self._free.append(block.slot)
            else:
                self._unpinned[block.digest] = block

    def fail(self, block: HostBlock) -> None:
        """Remove a block that could not be read from disk, so that the next look-up does not find it."""
        block.failed = True
        del self._blocks[block.digest]

    def touch(self, digests: Sequence[bytes]) -> None:
        """Record that one sequence's blocks were used just now; its last block is evicted first.

        digests: of the blocks, in order.
        """
        for digest in reversed(digests):
            if digest in self._unpinned:
                self._unpinned.move_to_end(digest)

    def view(self, block: HostBlock) -> memoryview:
        """Return the bytes of a block's slot as a memoryview of host memory, to read or to write."""
        return self.memory[block.slot].numpy().data
