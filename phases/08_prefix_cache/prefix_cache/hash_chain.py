"""A prefix index by hashes: a block's hash covers its tokens and the hash before it, and so names a prefix.

This is vLLM's automatic prefix caching (https://docs.vllm.ai/en/latest/design/prefix_caching.html). A hash
is not proof: 64 bits collide by chance after some billions of blocks, and on purpose much sooner. Every hit
is therefore checked against the tokens and the block before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from prefix_cache.index import Key, Match


@dataclass(eq=False, slots=True)
class Entry:
    """A cached block in the hash index.

    digest: the hash of all tokens up to the block's end. key: the block's tokens, as bytes.
    block: the block's number.
    before: the entry of the block that precedes it; None for a sequence's first block.
    salt: that of the requests that may share the block.
    pins: number of requests that use the block; with 0, it can be evicted.
    """

    digest: int
    key: Key
    block: int
    before: Entry | None
    salt: str
    pins: int = 0


@dataclass(eq=False, slots=True)
class Cursor:
    """A request's position in the hash index: the entry of the last cached block that the request uses.

    entry: that of this block; None: the request uses none. digest: the hash of all tokens up to the block's
        end.
    salt: the request's. broken: True after a hash collision: no later block of the request is inserted.
    """

    digest: int
    entry: Entry | None
    salt: str
    broken: bool = False


class HashIndex:
    """A prefix index (`PrefixIndex`) as a hash table, by the hash of a block and all blocks before it.

    Args:
        digest: the hash function, from bytes to 64 bits; tests give a weak one to make collisions.
    """

    def __init__(self, digest: Callable[[bytes], int] = xxhash.xxh3_64_intdigest) -> None:
        self._digest = digest
        self._entries: dict[int, Entry] = {}
        self._unpinned: OrderedDict[int, Entry] = OrderedDict()  # oldest first
        self.collisions = 0

    @property
    def evictable(self) -> int:
        """Return the number of blocks that no request uses, wherever they are in their sequences."""
        return len(self._unpinned)

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return a `Match`: the blocks of the longest cached beginning of a sequence.

        keys: the tokens of each of its blocks. salt: blocks inserted under another salt do not match.
        Changes nothing.
        """
        found = self._walk(keys, salt)
        return Match([entry.block for entry in found], sum(entry.pins == 0 for entry in found))

    def attach(self, keys: list[Key], salt: str) -> Cursor:
        """Pin (keep from eviction) the blocks of `keys`, found by `match`; return a cursor after them.

        keys: the tokens of each block. salt: the request's.
        """
        cursor = Cursor(self._start(salt), None, salt)
        for entry in self._walk(keys, salt):
            self._pin(entry)
            cursor.digest, cursor.entry = entry.digest, entry
        return cursor

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[Cursor, list[int], list[int]]:
        """Insert a request's next `blocks` into the index, after the block at which its `cursor` stands.

        keys: the tokens of each block. After a hash collision no more blocks of the request are inserted.

        Returns:
            The new cursor; for each key the block to use, which is the index's if it had these tokens
            already; and those of `blocks` that were inserted.
        """
        assert isinstance(cursor, Cursor)
        held, new = list[int](), list[int]()
        for key, block in zip(keys, blocks, strict=True):
            digest = self._next(cursor.digest, key)
            entry = None if cursor.broken else self._entries.get(digest)
            if cursor.broken or (
                entry is not None and not _same(entry, key, cursor.entry, cursor.salt)
            ):
                self.collisions += not cursor.broken
                cursor.broken = True
                held.append(block)
                continue
            if entry is None:
                entry = self._entries[digest] = Entry(
                    digest, key, block, cursor.entry, cursor.salt
                )
                self._unpinned[digest] = entry  # until it is pinned, in a moment
                new.append(block)
            self._pin(entry)
            held.append(entry.block)
            cursor.digest, cursor.entry = digest, entry
        return cursor, held, new

    def fork(self, cursor: object) -> Cursor:
        """Return a second cursor at the same block, for a request that shares all blocks up to there.

        These get one more pin: they are kept from eviction until both requests have ended.
        """
        assert isinstance(cursor, Cursor)
        copy = Cursor(cursor.digest, cursor.entry, cursor.salt, cursor.broken)
        entry = copy.entry
        while entry is not None:
            self._pin(entry)
            entry = entry.before
        return copy

    def detach(self, cursor: object) -> None:
        """Remove one pin of each of a request's blocks, from its cursor back to the first.

        Blocks without pins can be evicted from now on. So a sequence's last blocks are evicted before its
        first ones.
        """
        entry = cursor.entry if isinstance(cursor, Cursor) else None
        while entry is not None:
            entry.pins -= 1
            if entry.pins == 0:
                self._unpinned[entry.digest] = entry
            entry = entry.before

    def evict(self, count: int) -> list[int]:
        """Remove at most `count` blocks no request uses, least recently used first; return their numbers.

        A block is unpinned, and so evicted, before the block that precedes it.
        """
        freed: list[int] = []
        while len(freed) < count and self._unpinned:
            digest, entry = self._unpinned.popitem(last=False)
            del self._entries[digest]
            freed.append(entry.block)
        return freed

    def blocks(self) -> list[int]:
        """Return the number of every block in the index."""
        return [entry.block for entry in self._entries.values()]

    def _walk(self, keys: list[Key], salt: str) -> list[Entry]:
        found: list[Entry] = []
        digest, before = self._start(salt), None
        for key in keys:
            digest = self._next(digest, key)
            entry = self._entries.get(digest)
            if entry is None or not _same(entry, key, before, salt):
                break
            found.append(entry)
            before = entry
        return found

    def _start(self, salt: str) -> int:
        return self._digest(salt.encode())

    def _next(self, digest: int, key: Key) -> int:
        return self._digest(digest.to_bytes(8, "little") + key)

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            del self._unpinned[entry.digest]
        entry.pins += 1


def _same(entry: Entry, key: Key, before: Entry | None, salt: str) -> bool:
    """Return True if an entry really is the block of `key` in a sequence, not only one with the same hash.

    key: the block's tokens. before: the entry of the block before; None for a first block. By induction
    over `before` this compares the whole sequence, one block at a time. The salt is compared as well: a
    first block has no `before` that would tell whose it is.
    """
    return entry.key == key and entry.before is before and entry.salt == salt
