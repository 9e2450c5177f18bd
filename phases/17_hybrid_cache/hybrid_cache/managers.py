"""Managers: what one kind of layers keeps of every request, block by block.

A *page* is what an entry of a block table names: `P` tokens of a request, or of several that share them. For
each group of layers a page has a block of the pool, or none. Layers of one kind (full attention, a window)
need the same pages, so all groups of a kind have one manager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.lru_pool import LruPool

Table = NDArray[np.int32]
"""A request's row of the block tables: the page of each place."""


class ManagerSizes(NamedTuple):
    """Sizes of an engine: requests that run at most, tokens in a page, and of one request in a step."""

    rows: int
    block_size: int
    step_tokens: int


class Manager(ABC):
    """Books of the blocks of one kind of layers. A kind implements `first`, `reach` and `agrees`.

    A state fits in as well (`state.py`): the state behind a page's last computed token is that page's block.
    A query at `start` needs the state of place `(start - 1) // P` alone. Its step writes that of the place in
    which it ends; what it jumps over gets none, and a hit ends where there is one.

    A request holds a range of places in its table, from the first that its next query needs. Its pages there
    have a block in each group. A page that no running request needs keeps its blocks while a prefix hit may
    want them, and loses them when the stock needs room.

    Args:
        groups: layers of each group.
        stock: where blocks come from.
        blocks: `[groups, pages]` int32, the block of each page; `stock.null` where there is none.
        changed: pages whose blocks have changed, for the device's copy.
        limits: of the engine.

    users: by page, running requests that need its blocks.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        stock: LruPool,
        blocks: NDArray[np.int32],
        changed: set[int],
        limits: ManagerSizes,
    ) -> None:
        self.groups = groups
        self.stock = stock
        self.blocks = blocks
        self.changed = changed
        self.width = len(groups)
        blocks[:] = stock.null
        _, self.block_size, self.step_tokens = limits
        self.users = [0] * blocks.shape[1]
        self.held = [(0, 0)] * limits.rows  # the places in use: from, to

    # Rules of a kind.

    @abstractmethod
    def first(self, start: int) -> int:
        """Return the first place that a query at position `start` or later needs."""

    @abstractmethod
    def reach(self, start: int, upto: int) -> int:
        """Return the end of the places that must have blocks: `start` tokens are computed, and room up to
        `upto` is asked for. A step that follows computes `step_tokens` at most, and no more than to `upto`.
        """

    @abstractmethod
    def agrees(self, pages: Sequence[int]) -> int:
        """Return how many of these first pages of a sequence a request can begin behind, at most."""

    def most(self, tokens: int) -> int:
        """Return the blocks that a request of so many tokens needs at once, at most."""
        starts = range(0, tokens + 1, self.block_size)
        return self.width * max(self.reach(at, tokens) - self.first(at) for at in starts)

    # Requests. `table` is the request's row of the tables.

    def cost(self, pages: Sequence[int], start: int, upto: int) -> int:
        """Return the blocks that admission pins for a request that begins behind these pages."""
        first, end = self.first(start), self.reach(start, upto)
        pinned = sum(self.users[page] > 0 for page in pages[first:])
        return self.width * (max(0, end - first) - pinned)

    def attach(self, row: int, table: Table, start: int) -> None:
        """Let a request that begins at `start` use what it needs of the pages that a hit has found."""
        first, end = self.first(start), start // self.block_size
        self.held[row] = first, end
        for page in table[first:end].tolist():
            self._use(page)

    def lacks(self, row: int, table: Table, start: int, upto: int) -> int:
        """Return the blocks that `grow` takes, and before it `copy` where others use the page of `start`."""
        end, place = self.held[row][1], start // self.block_size
        shared = place < end and self.users[table[place]] > 1
        return self.width * (max(0, self.reach(start, upto) - end) + shared)

    def grow(self, row: int, table: Table, start: int, upto: int) -> int:
        """Give blocks to the pages of all places within reach; returns the tokens that there is room for."""
        first, end = self.held[row]
        reach = max(end, self.reach(start, upto))
        for page in table[end:reach].tolist():
            self._change(page, users=1, blocks=self.stock.take(self.width))
        self.held[row] = first, reach
        return reach * self.block_size

    def slide(self, row: int, table: Table, start: int, committed: int) -> None:
        """Give back the blocks of the places that no query at `start` or later needs.

        Those of the first `committed` places stay for prefix hits, while there is room.
        """
        first, end = self.held[row]
        now = min(max(first, self.first(start)), end)
        if now == first:
            return
        for place, page in enumerate(table[first:now].tolist(), first):
            self._drop(page, self.stock.slid if place < committed else None)
        self.held[row] = now, end

    def share(self, parent: int, child: int, table: Table, tokens: int) -> None:
        """Let the child use what it needs of its parent's first `tokens` tokens; see `PagedCache.fork`."""
        first, end = self.first(tokens), -(-tokens // self.block_size)
        self.held[child] = first, end
        for page in table[first:end].tolist():
            self._use(page)

    def copy(self, source: int, target: int) -> list[tuple[int, int]]:
        """Give the new page `target` blocks, and the user of `source` to it; returns blocks to copy."""
        self._drop(source, None)
        self._change(target, users=1, blocks=self.stock.take(self.width))
        return list(
            zip(self.blocks[:, source].tolist(), self.blocks[:, target].tolist(), strict=True)
        )

    def swap(self, row: int, place: int, mine: int, theirs: int) -> None:
        """Let a request use another page with the same tokens. It gets the blocks if it has none."""
        if self.has(mine) and not self.has(theirs):
            blocks = self.blocks[:, mine].tolist()
            self._change(mine, blocks=[self.stock.null] * self.width)
            self._change(theirs, blocks=blocks)
            if not self.users[theirs]:
                self.stock.ends[self, theirs] = None
        first, end = self.held[row]
        if first <= place < end:
            self._use(theirs)
            self._drop(mine, None)

    def leave(self, row: int, table: Table, committed: int) -> None:
        """Let go of all that a request holds."""
        first, end = self.held[row]
        for place, page in enumerate(table[first:end].tolist(), first):
            self._drop(page, self.stock.ends if place < committed else None)
        self.held[row] = 0, 0

    # Pages.

    def has(self, page: int) -> bool:
        """Return True if a page has blocks."""
        return bool(self.blocks[0, page] != self.stock.null)

    def lose(self, page: int) -> None:
        """Free the blocks of a page, which no request needs any more."""
        self.stock.slid.pop((self, page), None)
        self.stock.ends.pop((self, page), None)
        if self.has(page):
            self.stock.books.release(self.blocks[:, page].tolist())
            self._change(page, blocks=[self.stock.null] * self.width)

    def _use(self, page: int) -> None:
        """Add a user."""
        self.stock.slid.pop((self, page), None)
        self.stock.ends.pop((self, page), None)
        self._change(page, users=1)

    def _drop(self, page: int, idle: dict[tuple[Manager, int], None] | None) -> None:
        """Take a user away. After the last one blocks stay for hits in `idle`, or are free."""
        self._change(page, users=-1)
        if self.users[page] == 0 and self.has(page):
            if idle is None:
                self.lose(page)
            else:
                idle[self, page] = None

    def _change(self, page: int, users: int = 0, blocks: Sequence[int] | None = None) -> None:
        """Change a page's users or blocks, and with them the count of pinned blocks."""
        before = self.users[page] > 0 and self.has(page)
        self.users[page] += users
        assert self.users[page] >= 0, f"page {page} has {self.users[page]} users"
        if blocks is not None:
            self.blocks[:, page] = blocks
            self.changed.add(page)
        self.stock.pinned += self.width * ((self.users[page] > 0 and self.has(page)) - before)

    def check(self) -> list[int]:
        """Return every block in use. Raises `AssertionError` if a page needs blocks that it does not have."""
        for page, users in enumerate(self.users):
            if users and not self.has(page):
                raise AssertionError(f"page {page} has {users} users, but no blocks")
        found: list[int] = self.blocks[self.blocks != self.stock.null].tolist()
        return found


class FullManager(Manager):
    """Layers whose queries see all keys: every page keeps its blocks as long as it lives."""

    def first(self, start: int) -> int:
        """The first of all."""
        return 0

    def reach(self, start: int, upto: int) -> int:
        """All."""
        return -(-upto // self.block_size)

    def agrees(self, pages: Sequence[int]) -> int:
        """All of them: what is found has its blocks."""
        return len(pages)


class WindowManager(Manager):
    """Layers whose queries see the last `window` keys, their own included."""

    def __init__(self, window: int, *books: Any) -> None:
        super().__init__(*books)
        self.window = window

    def first(self, start: int) -> int:
        """The place of the oldest key in the window of the query at `start`."""
        return max(0, start - self.window + 1) // self.block_size

    def reach(self, start: int, upto: int) -> int:
        """A window and a step: a long prompt takes no blocks for what it computes later.

        It takes as many at once as it will ever hold, so that it is not stopped half way.
        """
        return -(-min(upto, max(start, self.window - 1) + self.step_tokens) // self.block_size)

    def most(self, tokens: int) -> int:
        """All pages that a window and a step touch, which may begin anywhere in a page."""
        span = self.window - 1 + self.step_tokens
        return self.width * min(
            -(-tokens // self.block_size), (span + self.block_size - 2) // self.block_size + 1
        )

    def agrees(self, pages: Sequence[int]) -> int:
        """Of the pages before a hit's end only those within the window need blocks: match from the right."""
        length = len(pages)
        while length:
            first = self.first(length * self.block_size)
            missing = [at for at in range(first, length) if not self.has(pages[at])]
            if not missing:
                break
            length = missing[0]  # every longer hit up to here would need this page, too
        return length
