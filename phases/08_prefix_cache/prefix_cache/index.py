"""The interface of a prefix cache's index, which finds the blocks that hold the beginning of a sequence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

Key = bytes
"""The tokens of one full block, as bytes: equal keys are equal tokens."""


class Match(NamedTuple):
    """The result of a look-up in a prefix index.

    blocks: block numbers that hold the beginning of the sequence, in order.
    unpinned: how many of them no request uses.
    """

    blocks: list[int]
    unpinned: int


class PrefixIndex(Protocol):
    """A set of cached blocks, found by the tokens they hold and all tokens before them.

    A *cursor* is a position in the index: the end of what one request shares. All blocks from the start to
    it are pinned, that is, not evicted. Requests see only what was inserted under the same salt. The index
    counts no users: the cache that inserts a block keeps it until `evict` returns it.
    """

    @property
    def evictable(self) -> int:
        """Return the number of blocks that `evict` could free."""

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return a `Match`: the blocks of the longest cached beginning of `keys` (the tokens of each block).

        salt: only sequences inserted under the same one match. Changes nothing.
        """

    def attach(self, keys: list[Key], salt: str) -> object:
        """Pin (keep from eviction) the blocks of `keys`, all found by `match`, and return a cursor at their
        end.
        """

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[object, list[int], list[int]]:
        """Move a cursor past these blocks, inserting those that are not in the index yet.

        Args:
            cursor: invalid afterwards; only the returned one may be used.
            keys, blocks: one of each for every block after the cursor, in order.

        Returns:
            The new cursor, which pins the blocks; for every key the block that the index holds, which is
            not the one in `blocks` if another request inserted the key before; and those of `blocks` that
            were inserted. A block that could not be inserted stays its owner's: it is in the second list,
            not in the third.
        """

    def fork(self, cursor: object) -> object:
        """Return a second cursor at the same position, which pins the blocks up to it once more."""

    def detach(self, cursor: object) -> None:
        """Unpin everything from the start to the cursor, which is invalid afterwards."""

    def evict(self, count: int) -> list[int]:
        """Remove at most `count` blocks without pins, the least recently used first, and return them."""

    def blocks(self) -> list[int]:
        """Return the number of every block in the index."""
