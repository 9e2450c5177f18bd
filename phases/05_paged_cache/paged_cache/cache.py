"""The paged cache: a request's tokens live in blocks anywhere in a pool, found through its block table.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023
(arXiv 2309.06180). Phase 04's cache has memory for the longest request in every row; a block table grows a
block at a time, so at most the last block of a request is partly empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from continuous.work import Work
from paged_cache.allocator import BlockAllocator


class PagedCache:
    """The host's side of a paged KV cache: block tables and a free list. It caches nothing between requests.

    Args:
        rows: most requests that run at a time.
        max_len: most tokens of a request.
        blocks: blocks in the pool, `N`.
        block_size: tokens in a block, `P`.
        watermark: share of the pool that admission leaves free for the requests that run already, so that
            a new request is not the reason for the next preemption.

    tables: `[rows, max_blocks]` int32. Token `p` of the request in row `r` is in block `tables[r, p // P]`.
    """

    def __init__(
        self, rows: int, max_len: int, blocks: int, block_size: int, *, watermark: float = 0.01
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(blocks)
        self.tables: NDArray[np.int32] = np.zeros((rows, -(-max_len // block_size)), np.int32)
        self.reserve_blocks = int(watermark * blocks)
        self._owned = [0] * rows  # how many entries of each table are in use
        # Up to this many tokens a row may write without asking again: it has the blocks from the token that
        # is written next up to there, and is their only user. Never too high; too low costs a look.
        self._writable = [0] * rows
        self._copies: list[tuple[int, int]] = []
        self._fresh: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def blocks_of(self, row: int) -> list[int]:
        """Return the numbers of the blocks that the request in `row` uses, in the order of its tokens."""
        blocks: list[int] = self.tables[row, : self._owned[row]].tolist()
        return blocks

    @property
    def free(self) -> int:
        """Return the number of free blocks."""
        return self.allocator.free

    def holds(self, tokens: int) -> bool:
        """Return True if a request could keep this many tokens if it had the cache for itself."""
        return self.blocks_for(tokens) <= min(self.allocator.count, self.tables.shape[1])

    def fits(self, request: Request) -> bool:
        """Return True if there are blocks to admit a waiting request with all the tokens it has.

        Blocks reserved for others in this step are not free any more.
        """
        kept = 0 if self.free == self.allocator.count else self.reserve_blocks
        return self.blocks_for(len(request.tokens)) <= self.free - kept

    def reserve(self, request: Request, upto: int) -> bool:
        """Grow the request's block table to `upto` tokens; return False without enough blocks."""
        if upto <= self._writable[request.row]:
            return True
        return self.grow(request, upto)

    def grow(self, request: Request, upto: int) -> bool:
        """Take blocks for a request's first `upto` tokens, and copy a shared block that will be written.

        The device makes the copy before the step's writes.

        Returns:
            False, with nothing changed, if there are not enough free blocks; else True.
        """
        row = request.row
        owned = self._owned[row]
        # The block to be written next has to be copied if it has another user.
        shared = self._writable[row] // self.block_size
        copy = shared < owned and self.allocator.refs[int(self.tables[row, shared])] > 1
        new = max(0, self.blocks_for(upto) - owned)
        if new + copy > self.free:
            return False
        if copy:
            source = int(self.tables[row, shared])
            (target,) = self.take_blocks(1)
            self.tables[row, shared] = target
            self._copies.append((source, target))
            self.allocator.release([source])
        if new:
            self.tables[row, owned : owned + new] = self.take_blocks(new)
            self._owned[row] = owned + new
        self._writable[row] = self._owned[row] * self.block_size
        return True

    def take_blocks(self, count: int) -> list[int]:
        """Take `count` free blocks and return their numbers; the caller has checked that as many are free."""
        blocks = self.allocator.allocate(count)
        self._fresh += blocks
        return blocks

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let `child`, which has no blocks yet, share those of its parent's first `tokens` tokens.

        A full block is shared for good. The last, partial one is shared until a request writes to it, which
        then gets a copy; its last user keeps the original (copy on write). So from here on neither request
        may write without calling `reserve` again. Blocks of the parent beyond `tokens` stay its own.
        """
        blocks = self.blocks_of(parent.row)[: self.blocks_for(tokens)]
        self.allocator.retain(blocks)
        self.tables[child.row, : len(blocks)] = blocks
        self._owned[child.row] = len(blocks)
        full = tokens // self.block_size * self.block_size
        self._writable[child.row] = self._writable[parent.row] = full

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) block numbers to copy before the next step writes; each target once.

        The list is emptied. All sources must be read before any target is written.
        """
        copies, self._copies = self._copies, []
        return copies

    def take_fresh(self) -> list[int]:
        """Return the blocks that have got a new owner since the last call, before a step and its copies."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_moves(self, works: Sequence[Work]) -> Any:
        """Return which blocks move between groups of layers before a step of these works: here none.

        Phase 17 overrides it.
        """

    def lookup(self, request: Request) -> int:
        """Return how many of the request's first tokens are cached: 0, since this cache keeps no blocks."""
        return 0

    def commit(self, request: Request, upto: int) -> None:
        """Do nothing: this cache does not share blocks by their tokens."""

    def release(self, request: Request) -> None:
        """Free a request's blocks, the last one first, so that its first block is the next to be taken.

        Copies into these blocks that were not made, because their step was not launched, are dropped: the
        next request may want to copy into the same block.
        """
        row, blocks = request.row, self.blocks_of(request.row)
        self.allocator.release(reversed(blocks))
        self._copies = [copy for copy in self._copies if copy[1] not in blocks]
        self._owned[row] = self._writable[row] = 0

    def forget(self) -> None:
        """Free the cached blocks that no request uses: this cache keeps none."""

    def users(self) -> list[int]:
        """Return the numbers of all blocks in use, each once for each request that uses it."""
        return [block for row in range(len(self._owned)) for block in self.blocks_of(row)]

    def check(self) -> None:
        """Raise `AssertionError` unless the users counted for each block are those in the block tables."""
        self.allocator.check(self.users())
