"""The interface of a prefix cache's index, which finds the blocks that hold the beginning of a sequence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

Key = bytes
"""The tokens of one full block, as bytes: equal keys are equal tokens."""


class Match(NamedTuple):
    """The result of a look-up in a prefix index.

    blocks: numbers of the blocks that hold the beginning of the sequence, in order.
    unpinned: how many of these no request uses, so that they could be evicted.
    """

    blocks: list[int]
    unpinned: int


class PrefixIndex(Protocol):
    """A set of cached blocks, found by the tokens they hold and all tokens before them.

    A *cursor* is a request's position in the index: the end of the blocks that it shares. These are pinned,
    that is, kept from eviction. Requests see only blocks that were inserted under the same salt. The index
    counts no users: the cache that inserts a block keeps it until `evict` returns it.
    """

    @property
    def evictable(self) -> int:
        """Return the number of blocks that `evict` could free."""

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return a `Match`: the blocks of the longest cached beginning of a sequence.

        keys: the tokens of each of its blocks. salt: blocks inserted under another salt do not match.
        Changes nothing.
        """

    def attach(self, keys: list[Key], salt: str) -> object:
        """Pin (keep from eviction) the blocks of `keys`, found by `match`; return a cursor after them.

        keys: the tokens of each block. salt: the request's.
        """

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[object, list[int], list[int]]:
        """Insert a request's next blocks into the index, and move the request's cursor to the last of them.

        Args:
            cursor: the request's position; invalid afterwards, only the returned one may be used.
            keys, blocks: the tokens and the number of each block after the cursor, in order.

        Returns:
            The new cursor, which pins the blocks; for every key the block to use, which is the index's and
            not that in `blocks` if another request has inserted these tokens before; and those of `blocks`
            that were inserted. A block that could not be inserted stays the request's own: it is in the
            second list, not in the third.
        """

    def fork(self, cursor: object) -> object:
        """Return a second cursor at the same position, for a request that shares all blocks up to there.

        These get one more pin: they are kept from eviction until both requests have ended.
        """

    def detach(self, cursor: object) -> None:
        """Remove one pin of each of a request's blocks, from the first to `cursor`.

        The cursor is invalid afterwards. Blocks without pins can be evicted.
        """

    def evict(self, count: int) -> list[int]:
        """Remove at most `count` blocks no request uses, least recently used first; return their numbers."""

    def blocks(self) -> list[int]:
        """Return the number of every block in the index."""
