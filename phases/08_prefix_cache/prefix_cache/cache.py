"""A paged KV cache whose blocks stay cached when their requests end, until their memory is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from paged_cache.cache import PagedCache
from prefix_cache.index import Key, Match, PrefixIndex


def block_keys(tokens: Sequence[int] | NDArray[np.int64], block_size: int) -> list[Key]:
    """Return the keys (the tokens) of the full blocks of `block_size` tokens, in order."""
    width = 4 * block_size
    raw = np.asarray(tokens, np.int32).tobytes()
    return [raw[at : at + width] for at in range(0, len(raw) - width + 1, width)]


@dataclass
class PrefixStats:
    """Counts of the prefix cache since the start, or since `PrefixCache.forget`.

    lookup_tokens: tokens of admitted requests. hit_tokens: those of them whose keys and values were cached.
    evicted_blocks: blocks evicted because other requests needed their memory.
    """

    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the share of admitted requests' tokens that were cached, from 0 to 1; 0 without any."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0


class PrefixCache(PagedCache):
    """A paged KV cache whose full blocks are also in a prefix index, and shared by content.

    The index is one user of every block in it, each request that shares it another. Blocks that only the
    index uses count as free: they are evicted when they are needed.
    """

    def __init__(
        self,
        rows: int,
        max_len: int,
        blocks: int,
        block_size: int,
        index: PrefixIndex,
        *,
        watermark: float = 0.01,
    ) -> None:
        super().__init__(rows, max_len, blocks, block_size, watermark=watermark)
        self.index, self.stats = index, PrefixStats()
        self._cursors: list[object | None] = [None] * rows
        self._committed = [0] * rows  # how many blocks of each row are in the index
        self._keys: tuple[Request | None, int, list[Key]] = (None, 0, [])

    @property
    def free(self) -> int:
        """Return the number of blocks that are free or can be evicted from the index."""
        return self.allocator.free + self.index.evictable

    def fits(self, request: Request) -> bool:
        """Return True if a waiting request can be admitted with its cached blocks.

        Cached blocks need no memory, but once they are pinned they cannot be evicted.
        """
        alone = self.free == self.allocator.count
        room = self.free - (0 if alone else self.reserve_blocks)
        if room < 1:
            return False
        hit = self._match(request)
        return self.blocks_for(len(request.tokens)) - len(hit.blocks) + hit.unpinned <= room

    def lookup(self, request: Request) -> int:
        """Return how many of a request's tokens are in cached full blocks; always fewer than the request has.

        The last token has to be computed, since its logits are wanted. If the last block is full and
        cached, all of that block is computed: one token would be written into a block that others share.
        """
        return len(self._match(request).blocks) * self.block_size

    def _match(self, request: Request) -> Match:
        return self.index.match(self._keys_of(request), request.salt)

    def _keys_of(self, request: Request) -> list[Key]:
        """Return the index keys (block by block the tokens) of the blocks that a waiting request may share.

        The keys of the last request are stored for the next call.
        """
        length = len(request.tokens)
        if self._keys[0] is not request or self._keys[1] != length:
            keys = block_keys(request.ids(0, length - 1), self.block_size)
            self._keys = request, length, keys
        return self._keys[2]

    def grow(self, request: Request, upto: int) -> bool:
        """Reserve blocks for a request's first `upto` tokens; share its cached blocks at the first call.

        Returns:
            False if there are not enough free blocks; else True.
        """
        row = request.row
        if self._cursors[row] is None:
            if not self.fits(request):
                return False
            keys = self._keys_of(request)[: request.num_computed_tokens // self.block_size]
            blocks = self.index.match(keys, request.salt).blocks
            self._cursors[row] = self.index.attach(keys, request.salt)
            self.allocator.retain(blocks)
            self.tables[row, : len(blocks)] = blocks
            self._owned[row] = self._committed[row] = len(blocks)
            self._writable[row] = len(blocks) * self.block_size
            self.stats.lookup_tokens += len(request.tokens)
            self.stats.hit_tokens += request.num_computed_tokens
            self._keys = (None, 0, [])
        return super().grow(request, upto)

    def take_blocks(self, count: int) -> list[int]:
        """Take `count` blocks; what is missing, evict from the least recently used cached ones."""
        missing = count - self.allocator.free
        if missing > 0:
            evicted = self.index.evict(missing)
            self.stats.evicted_blocks += len(evicted)
            self.allocator.release(evicted)
        return super().take_blocks(count)

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let `child` share its parent's blocks of the first `tokens` tokens, and pin those in the index."""
        super().fork(parent, child, tokens)
        self._cursors[child.row] = self.index.fork(self._cursors[parent.row])
        self._committed[child.row] = self._committed[parent.row]

    def commit(self, request: Request, upto: int) -> None:
        """Insert the full blocks of a request's first `upto` tokens into the index, to be shared.

        If another request has inserted the same tokens before, this request uses that block and frees its
        own: keys and values are the same, and no later step writes to a full block.
        """
        row, size = request.row, self.block_size
        first, last = self._committed[row], upto // size
        if last <= first:
            return
        own: list[int] = self.tables[row, first:last].tolist()
        keys = block_keys(request.ids(first * size, last * size), size)
        self._cursors[row], held, new = self.index.extend(self._cursors[row], keys, own)
        self.allocator.retain(new)
        for place, (mine, theirs) in enumerate(zip(own, held, strict=True), start=first):
            if mine != theirs:
                self.allocator.retain([theirs])
                self.allocator.release([mine])
                self.tables[row, place] = theirs
        self._committed[row] = last

    def release(self, request: Request) -> None:
        """Free a request's blocks; those in the index stay cached until their memory is needed."""
        row = request.row
        super().release(request)
        self.index.detach(self._cursors[row])
        self._cursors[row], self._committed[row] = None, 0

    def forget(self) -> None:
        """Evict every cached block that no request uses, and reset the statistics."""
        self.allocator.release(self.index.evict(self.index.evictable))
        self.stats = PrefixStats()

    def users(self) -> list[int]:
        """Return the numbers of all blocks in use, each once for each user: requests and the index."""
        return super().users() + self.index.blocks()

    def check(self) -> None:
        """Raise `AssertionError` unless each block's count is that of its users (requests and the index).

        Evictable blocks must have the index as their only user.
        """
        super().check()
        alone = sum(self.allocator.refs[block] == 1 for block in self.index.blocks())
        if alone != self.index.evictable:
            raise AssertionError(
                f"{alone} blocks are used by the index alone, but {self.index.evictable} evictable"
            )
