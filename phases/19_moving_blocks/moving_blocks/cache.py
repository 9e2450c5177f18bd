"""Phase 08's prefix cache, which tells the KV connector which blocks are full, evicted, or written to."""

from __future__ import annotations

from typing import Any

from common.request import Request
from moving_blocks.connector import NO_CONNECTOR, ConnectorScheduler
from moving_blocks.names import BlockName, chain
from prefix_cache import PrefixCache, PrefixIndex
from prefix_cache.cache import block_keys
from prefix_cache.index import Key


class OffloadingCache(PrefixCache):
    """A `PrefixCache` whose blocks may be saved to other memory and loaded from there.

    index: the prefix index, which finds and pins blocks. sizes: the other arguments of `PrefixCache`: rows,
        max_len, blocks, block_size.
    connector: saves and loads blocks; the default does nothing. It is set while the cache is empty.
    namespace: the digest of model and block format, a part of every block's name (`BlockName`).
    """

    def __init__(self, index: PrefixIndex, *sizes: int) -> None:
        rows, max_len, blocks, block_size = sizes
        super().__init__(rows, max_len, blocks, block_size, index)
        self.connector: ConnectorScheduler = NO_CONNECTOR
        self.namespace = b""
        self._names: list[list[BlockName]] = [[] for _ in self._owned]

    def keys_of(self, request: Request) -> list[Key]:
        """Return the tokens of each full block of a waiting request that may be shared, as index keys.

        The block of its last token is left out, since that token must be computed.
        """
        return self._keys_of(request)

    def commit(self, request: Request, upto: int) -> None:
        """Put the full blocks of a request's first `upto` tokens into the prefix index.

        The connector gets the names and numbers of the new ones, and may save them.
        """
        row, size = request.row, self.block_size
        first = self._committed[row]
        super().commit(request, upto)
        last = self._committed[row]
        if last <= first:
            return
        names = self._names[row]
        keys = block_keys(request.ids(len(names) * size, last * size), size)
        names += chain(self.namespace, request.salt, keys, names)
        self.connector.save_blocks(names[first:last], self.tables[row, first:last].tolist())

    def release(self, request: Request) -> None:
        """Free a request's blocks; tell the connector (what saves blocks) that they were just used."""
        names = self._names[request.row]
        super().release(request)
        self.connector.request_finished(names)
        self._names[request.row] = []

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let the request `child` share the blocks of its parent's first `tokens` tokens, and their names."""
        super().fork(parent, child, tokens)
        self._names[child.row] = self._names[parent.row][: self._committed[parent.row]]

    def take_blocks(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, after evicting cached ones if need be.

        The connector saves evicted blocks before a step writes to them.
        """
        self._evict(count - self.allocator.free)
        blocks = super().take_blocks(count)
        self.connector.blocks_allocated(blocks)
        return blocks

    def forget(self) -> None:
        """Evict all blocks that no request uses; reset the statistics. Saved blocks can be loaded again."""
        self._evict(self.index.evictable)
        super().forget()

    def _evict(self, count: int) -> None:
        if count > 0:
            evicted = self.index.evict(count)
            self.stats.evicted_blocks += len(evicted)
            self.connector.blocks_evicted(evicted)
            self.allocator.release(evicted)

    def take_moves(self, works: Any) -> Any:
        """Start the saves that must come before this step; return None (no block moves between groups).

        The runner calls this before it launches a kernel of the step. works: the step's requests and tokens.
        """
        self.connector.before_step()
        return super().take_moves(works)

    def users(self) -> list[int]:
        """Return the numbers of used blocks, once for each use; unfinished loads are users as well."""
        return super().users() + self.connector.held_blocks()

    # For loads.

    def begin_load(
        self, keys: list[Key], salt: str, count: int
    ) -> tuple[object, list[int], list[int]]:
        """Pin the blocks of `keys`, which are cached under `salt`, and take `count` free blocks to load into.

        Returns:
            A cursor (position in the index) at the end of the cached blocks, the numbers of the cached
            blocks, and the numbers of the blocks to load into. The caller is a user of all of them, until it
            releases them.
        """
        cached = self.index.match(keys, salt).blocks
        cursor = self.index.attach(keys, salt)
        self.allocator.retain(cached)
        blocks = self.take_blocks(count)
        # A fresh block may be wiped before the next step. A loaded one must not be.
        loaded = set(blocks)
        self._fresh = [block for block in self._fresh if block not in loaded]
        return cursor, cached, blocks

    def end_load(self, cursor: object, keys: list[Key], blocks: list[int]) -> set[int]:
        """Insert loaded blocks into the index after `cursor`, and unpin the path from its root to their end.

        cursor: of `begin_load`. keys, blocks: the tokens and the number of each loaded block.

        Returns:
            Those of `blocks` that the index has taken. Another request may have computed some of the keys
            meanwhile; then the index keeps its own blocks. The caller is still a user of all `blocks`.
        """
        cursor, _, new = self.index.extend(cursor, keys, blocks)
        self.allocator.retain(new)
        self.index.detach(cursor)
        return set(new)
