"""The hash chain: each block's hash covers its tokens and the hash before it, so one number names a prefix.

This is vLLM's automatic prefix caching (https://docs.vllm.ai/en/latest/design/prefix_caching.html). A hash is
not proof: 64 bits collide by chance after some billions of blocks, and on purpose much sooner. Every hit is
therefore checked against the tokens and the block before.
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

    digest: the hash of all tokens up to its end. block: its number. key: its tokens. salt: of its requests.
    before: the entry that it continues; None for a sequence's first block.
    pins: requests that use it.
    """

    digest: int
    key: Key
    block: int
    before: Entry | None
    salt: str
    pins: int = 0


@dataclass(eq=False, slots=True)
class Cursor:
    """A request's position in the hash index: the entry of the last cached block that it uses.

    digest, entry: of that block; None: it uses none. salt: of the request.

    broken: True once a hash collision has ended the sharing.
    """

    digest: int
    entry: Entry | None
    salt: str
    broken: bool = False


class HashIndex:
    """A prefix index as a table from the hash of a block and all before it to the block; implements
    `PrefixIndex`.

    Args:
        digest: the hash function; tests give a weak one to make collisions.
    """

    def __init__(self, digest: Callable[[bytes], int] = xxhash.xxh3_64_intdigest) -> None:
        self._digest = digest
        self._entries: dict[int, Entry] = {}
        self._unpinned: OrderedDict[int, Entry] = OrderedDict()  # oldest first
        self.collisions = 0

    @property
    def evictable(self) -> int:
        """Return the number of blocks without pins, wherever they are in their sequences."""
        return len(self._unpinned)

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return a `Match`: the blocks of the longest cached beginning of `keys` (the tokens of each block).

        salt: only sequences inserted under the same one match. Changes nothing.
        """
        found = self._walk(keys, salt)
        return Match([entry.block for entry in found], sum(entry.pins == 0 for entry in found))

    def attach(self, keys: list[Key], salt: str) -> Cursor:
        """Pin (keep from eviction) the blocks of `keys`, all found by `match`, and return a cursor at their
        end.
        """
        cursor = Cursor(self._start(salt), None, salt)
        for entry in self._walk(keys, salt):
            self._pin(entry)
            cursor.digest, cursor.entry = entry.digest, entry
        return cursor

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[Cursor, list[int], list[int]]:
        """Insert `blocks` after those of the request that `cursor` stands for, one by one; after a hash
        collision no more blocks are inserted.

        keys: the tokens of each block.

        Returns:
            The new cursor, the block in the index for each key, and those of `blocks` that were inserted.
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
        """Return a second cursor at the same block, and pin it and all blocks before it once more."""
        assert isinstance(cursor, Cursor)
        copy = Cursor(cursor.digest, cursor.entry, cursor.salt, cursor.broken)
        entry = copy.entry
        while entry is not None:
            self._pin(entry)
            entry = entry.before
        return copy

    def detach(self, cursor: object) -> None:
        """Unpin the blocks of a request, given its cursor, from the end, so that a sequence's last blocks are
        evicted first.
        """
        entry = cursor.entry if isinstance(cursor, Cursor) else None
        while entry is not None:
            entry.pins -= 1
            if entry.pins == 0:
                self._unpinned[entry.digest] = entry
            entry = entry.before

    def evict(self, count: int) -> list[int]:
        """Remove at most `count` blocks without pins, the least recently used first, and return them.

        A block is unpinned, and so evicted, before the block that it continues.
        """
        freed: list[int] = []
        while len(freed) < count and self._unpinned:
            digest, entry = self._unpinned.popitem(last=False)
            del self._entries[digest]
            freed.append(entry.block)
        return freed

    def blocks(self) -> list[int]:
        """Return every block in the table."""
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
    """Return True if an entry has the tokens `key` after the block `before` and this salt, not merely their
    hash.

    before: None for a first block. By induction over `before` this compares the whole sequence, one block at
    a time. The salt counts, too: nothing before a first block would show whose it is.
    """
    return entry.key == key and entry.before is before and entry.salt == salt
