"""What a prefix cache asks of its index: which blocks hold the beginning of these tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

Key = bytes
"""The tokens of one full block, as bytes: equal keys are equal tokens."""


def block_keys(tokens: Sequence[int], block_size: int) -> list[Key]:
    """The keys of the full blocks of `tokens`, in order; a partial block at the end has none."""
    width = 4 * block_size
    raw = np.array(tokens, np.int32).tobytes()
    return [raw[at : at + width] for at in range(0, len(raw) - width + 1, width)]


class Match(NamedTuple):
    """The blocks that hold the beginning of a sequence, and how many of them nobody uses at the moment."""

    blocks: list[int]
    unpinned: int


class PrefixIndex(Protocol):
    """A set of cached blocks, found by the tokens they hold and all tokens before them.

    A *cursor* is a place in the index: the end of what one request shares. Everything on the way to it is
    pinned, that is, not evicted. Requests see only what was inserted under the same salt.
    """

    @property
    def evictable(self) -> int:
        """How many blocks `evict` could free."""
        ...

    def match(self, keys: list[Key], salt: str) -> Match:
        """The longest known beginning. Changes nothing."""
        ...

    def attach(self, keys: list[Key], salt: str) -> object:
        """Pin `keys`, all of which `match` has found, and return the cursor at their end."""
        ...

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[object, list[int], list[int]]:
        """Move a cursor on by these blocks, inserting those that are not known yet.

        Returns:
            The new cursor; the blocks that the index holds for these keys, which are others than `blocks`
            where somebody else was first; and those of `blocks` that were inserted.
        """
        ...

    def fork(self, cursor: object) -> object:
        """A second cursor at the same place, with pins of its own."""
        ...

    def detach(self, cursor: object) -> None:
        """Unpin everything on the way to the cursor."""
        ...

    def evict(self, count: int) -> list[int]:
        """Forget at most `count` blocks that nobody uses, least recently used first, and return them."""
        ...

    def blocks(self) -> list[int]:
        """Every block in the index."""
        ...
