"""The interface of a prefix cache's index: which blocks hold the beginning of these tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Key = bytes
"""The tokens of one full block, as bytes: equal keys are equal tokens."""


def block_keys(tokens: Sequence[int] | NDArray[np.int64], block_size: int) -> list[Key]:
    """Return the keys of the full blocks of `tokens`, in order; a partial block at the end has none."""
    width = 4 * block_size
    raw = np.asarray(tokens, np.int32).tobytes()
    return [raw[at : at + width] for at in range(0, len(raw) - width + 1, width)]


class Match(NamedTuple):
    """The blocks that hold the beginning of a sequence, and how many of them have no user at the moment."""

    blocks: list[int]
    unpinned: int


class PrefixIndex(Protocol):
    """A set of cached blocks, found by the tokens they hold and all tokens before them.

    A *cursor* is a place in the index: the end of what one request shares. Everything on the way to it is
    pinned, that is, not evicted. Requests see only what was inserted under the same salt. The index counts no
    users: the cache that inserts a block keeps it until `evict` returns it.
    """

    @property
    def evictable(self) -> int:
        """The number of blocks that `evict` could free."""

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return the longest known beginning. Changes nothing."""

    def attach(self, keys: list[Key], salt: str) -> object:
        """Pin `keys`, all of which `match` has found, and return the cursor at their end."""

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[object, list[int], list[int]]:
        """Move a cursor on by these blocks, inserting those that are not known yet.

        Args:
            cursor: used up; only the one returned is good from here on.
            keys, blocks: one of each for every place after the cursor, in order.

        Returns:
            The new cursor, which pins them; for every place the block that the index holds, another than in
            `blocks` where another request was first; and those of `blocks` that were inserted. A block that
            could not be inserted stays its owner's: it is held, but not new.
        """

    def fork(self, cursor: object) -> object:
        """Return a second cursor at the same place, with pins of its own."""

    def detach(self, cursor: object) -> None:
        """Unpin everything on the way to the cursor, which is used up."""

    def evict(self, count: int) -> list[int]:
        """Forget at most `count` blocks without a user, least recently used first, and return them."""

    def blocks(self) -> list[int]:
        """Return every block in the index."""
