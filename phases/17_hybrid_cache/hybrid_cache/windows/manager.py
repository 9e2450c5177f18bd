"""Managers: the blocks that one type of layers (full attention, a sliding window) keeps of every request.

A *page* is what an entry of a block table names: `P` tokens of a request, or of several requests that share
them. For each group of layers a page has a block of the pool, or none. All groups of one type need the same
pages, so they have one manager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.windows.lru_pool import LruPool

Table = NDArray[np.int32]
"""A request's row of the block tables: page numbers by position."""


class ManagerSizes(NamedTuple):
    """Sizes of an engine for its managers of blocks.

    rows: most running requests. block_size: tokens of a page. step_tokens: most tokens of one request in a
        step.
    """

    rows: int
    block_size: int
    step_tokens: int


class SingleTypeManager(ABC):
    """Allocator of blocks for one type of layers, such as those with a sliding window.

    groups: layers of each KV cache group. pool: where blocks come from. sizes: of the engine.
    blocks: `[groups, pages]` int32, the block of each page; `pool.null` where there is none. A page is a
        number in block tables for `block_size` tokens; each group has a block for it, or none.
    changed: collects pages whose blocks changed; the device's table of blocks is updated from it.
    users: by page, how many running requests need its blocks.
    ranges: by row of the block tables, the first page and the end of the range that its request needs.

    A type says which pages of a request it needs: a range of its table, from the first page that its next
    query reads to the last page that it may write. Each page of the range has a block in each group. A page
    that no running request needs keeps its blocks for prefix hits, and loses them when the pool needs room.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        pool: LruPool,
        blocks: NDArray[np.int32],
        changed: set[int],
        sizes: ManagerSizes,
    ) -> None:
        self.groups = groups
        self.pool = pool
        self.blocks = blocks
        self.changed = changed
        blocks[:] = pool.null
        _, self.block_size, self.step_tokens = sizes
        self.users = [0] * blocks.shape[1]
        self.ranges = [(0, 0)] * sizes.rows

    # Rules of a type.

    @abstractmethod
    def first_needed_page(self, start: int) -> int:
        """Return the index in a request's table of the first page that a query at position `start` or later
        reads.
        """

    @abstractmethod
    def required_pages(self, start: int, upto: int) -> int:
        """Return how many pages from the start of a request's block table must have blocks before a step.

        start: number of the request's computed tokens. upto: tokens that the scheduler reserves room for.
        """

    @abstractmethod
    def find_longest_cache_hit(self, pages: Sequence[int]) -> int:
        """Return the largest `n` such that a request can begin after the first `n` of these cached pages.

        pages: page numbers of a cached prefix, some of whose blocks may have been freed.
        """

    def max_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens has at once, in all groups together."""
        return len(self.groups) * -(-tokens // self.block_size)

    # Requests. `table` is the request's row of the block tables.

    def num_blocks_to_admit(self, pages: Sequence[int], start: int, upto: int) -> int:
        """Return how many free or idle blocks a new request needs that begins after these cached pages.

        pages: page numbers of its prefix hit. start: tokens of the hit. upto: tokens to reserve room for.
        """
        first, end = self.first_needed_page(start), self.required_pages(start, upto)
        pinned = sum(self.users[page] > 0 for page in pages[first:])
        return len(self.groups) * (max(0, end - first) - pinned)

    def attach(self, row: int, table: Table, tokens: int) -> None:
        """Add a request to the users of those pages of its first `tokens` tokens that its next query reads.

        row: of the request in the block tables. table: the pages of its prefix hit, or those of its parent.
        """
        first, end = self.first_needed_page(tokens), -(-tokens // self.block_size)
        self.ranges[row] = first, end
        for page in table[first:end].tolist():
            self._use(page)

    def num_blocks_to_allocate(self, row: int, table: Table, start: int, upto: int) -> int:
        """Return how many blocks a request still needs for its first `upto` tokens, copies of shared pages
        included.

        row: of the request in the block tables. table: its page numbers. start: its number of computed
            tokens.
        """
        end, at = self.ranges[row][1], start // self.block_size
        shared = at < end and self.users[table[at]] > 1
        return len(self.groups) * (max(0, self.required_pages(start, upto) - end) + shared)

    def allocate_blocks(self, row: int, table: Table, start: int, upto: int) -> int:
        """Allocate blocks for all pages that a request needs; return how many tokens these pages hold.

        row: of the request in the block tables. table: its page numbers. start: its number of computed
            tokens.
        upto: tokens to reserve room for.
        """
        first, end = self.ranges[row]
        required = max(end, self.required_pages(start, upto))
        for page in table[end:required].tolist():
            self._change(page, users=1, blocks=self.pool.take(len(self.groups)))
        self.ranges[row] = first, required
        return required * self.block_size

    def remove_skipped_blocks(
        self, row: int, table: Table, start: int, committed: int
    ) -> None:
        """Free the blocks of pages that no query of this request at position `start` or later reads.

        row: of the request in the block tables. table: its page numbers. committed: how many of them the
            prefix index has; the blocks of these stay cached, in the pool's `skipped`, and those of others
            become free.
        Afterwards the row's range begins with the first page that is still needed, or is empty.
        """
        first, end = self.ranges[row]
        now = min(max(first, self.first_needed_page(start)), end)
        for at, page in enumerate(table[first:now].tolist(), first):
            self._drop(page, self.pool.skipped if at < committed else None)
        self.ranges[row] = now, end

    def copy_page(self, source: int, target: int) -> list[tuple[int, int]]:
        """Let a request use the new page `target` in place of the shared page `source` (copy on write).

        Both are page numbers; `target` gets new blocks.

        Returns:
            The (source, target) pairs of block numbers that the device must copy.
        """
        self._drop(source, None)
        self._change(target, users=1, blocks=self.pool.take(len(self.groups)))
        both = self.blocks[:, source].tolist(), self.blocks[:, target].tolist()
        return list(zip(*both, strict=True))

    def replace_page(self, row: int, at: int, own: int, shared: int) -> None:
        """Let the request in row `row` use the page `shared` in place of its page `own`, which holds the same
        tokens.

        at: index of the page in the request's table. A page (tokens in all layers) has a block for each group
        of layers. If the blocks of `shared` have been evicted, it gets those of `own`.
        """
        if self.has_blocks(own) and not self.has_blocks(shared):
            blocks = self.blocks[:, own].tolist()
            self._change(own, blocks=[self.pool.null] * len(self.groups))
            self._change(shared, blocks=blocks)
            if not self.users[shared]:
                self.pool.finished[self, shared] = None
        first, end = self.ranges[row]
        if first <= at < end:
            self._use(shared)
            self._drop(own, None)

    def release_row(self, row: int, table: Table, committed: int) -> None:
        """Remove an ended request's use of its pages.

        row: of the request in the block tables. table: its page numbers. committed: how many of them the
            prefix index has; the blocks of these stay cached, those of others become free.
        """
        first, end = self.ranges[row]
        for at, page in enumerate(table[first:end].tolist(), first):
            self._drop(page, self.pool.finished if at < committed else None)
        self.ranges[row] = 0, 0

    # Pages.

    def has_blocks(self, page: int) -> bool:
        """Return True if the page with this number has blocks of this type of layers."""
        return bool(self.blocks[0, page] != self.pool.null)

    def evict(self, page: int) -> None:
        """Free the blocks of a cached page, given by its number, that no running request needs."""
        self._unlist(page)
        if self.has_blocks(page):
            self.pool.allocator.release(self.blocks[:, page].tolist())
            self._change(page, blocks=[self.pool.null] * len(self.groups))

    def check(self) -> list[int]:
        """Return the numbers of all blocks that this type of layers has in use or cached.

        Raises:
            AssertionError: a running request needs a page that has no blocks.
        """
        for page, users in enumerate(self.users):
            if users and not self.has_blocks(page):
                raise AssertionError(f"page {page} has {users} users, but no blocks")
        found: list[int] = self.blocks[self.blocks != self.pool.null].tolist()
        return found

    def _use(self, page: int) -> None:
        self._unlist(page)
        self._change(page, users=1)

    def _drop(self, page: int, idle: dict[tuple[SingleTypeManager, int], None] | None) -> None:
        """Remove one user of a page; if no user is left, put the page into `idle`, or free its blocks.

        page: its number; it has a block of the pool in each group. idle: the pool's `skipped` or `finished`,
            whose pages keep their blocks for prefix hits; None: the blocks become free.
        """
        self._change(page, users=-1)
        if self.users[page] == 0 and self.has_blocks(page):
            if idle is None:
                self.evict(page)
            else:
                idle[self, page] = None

    def _unlist(self, page: int) -> None:
        """Remove a page from the pool's lists of idle pages: a request uses it again, or it is evicted.

        Idle pages are those whose blocks are cached, but needed by no running request.
        """
        self.pool.skipped.pop((self, page), None)
        self.pool.finished.pop((self, page), None)

    def _change(self, page: int, users: int = 0, blocks: Sequence[int] | None = None) -> None:
        """Add `users` to a page's users, or set its blocks (None: they stay), and update the pool's count of
        pinned blocks.
        """
        before = self.users[page] > 0 and self.has_blocks(page)
        self.users[page] += users
        assert self.users[page] >= 0, f"page {page} has {self.users[page]} users"
        if blocks is not None:
            self.blocks[:, page] = blocks
            self.changed.add(page)
        after = self.users[page] > 0 and self.has_blocks(page)
        self.pool.pinned += len(self.groups) * (after - before)


class FullAttentionManager(SingleTypeManager):
    """The manager of layers whose queries see all keys: a page keeps its blocks as long as a request
    uses it.
    """

    def first_needed_page(self, start: int) -> int:
        """Return 0: a query reads all pages of its request, whatever its position `start`."""
        return 0

    def required_pages(self, start: int, upto: int) -> int:
        """Return how many pages the first `upto` tokens have: full attention reads them all, so each needs a
        block, wherever the step starts (`start`).
        """
        return -(-upto // self.block_size)

    def find_longest_cache_hit(self, pages: Sequence[int]) -> int:
        """Return the number of these cached pages: each page that the prefix index finds has its blocks."""
        return len(pages)


class SlidingWindowManager(SingleTypeManager):
    """The manager of blocks for layers whose queries see the last `window` keys, their own included.

    arguments: those of `SingleTypeManager`.
    """

    def __init__(self, window: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.window = window

    def first_needed_page(self, start: int) -> int:
        """Return the index in the table of the page with the oldest key in the window of the query at
        `start`.
        """
        return max(0, start - self.window + 1) // self.block_size

    def required_pages(self, start: int, upto: int) -> int:
        """Return how many pages from the start of a request's block table must have blocks before a step.

        They hold `max(start, window - 1)` tokens (`start`: computed tokens) and those of one step, but not
        more than `upto`. So a long prompt takes no blocks for what comes later. A request gets as many blocks
        at once as it will ever need, so it never stops half way for want of blocks.
        """
        tokens = min(upto, max(start, self.window - 1) + self.step_tokens)
        return -(-tokens // self.block_size)

    def max_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens has at once, in all groups together.

        These are the blocks of the pages that a window and a step touch.
        """
        span = self.window - 1 + self.step_tokens
        pages = (span + self.block_size - 2) // self.block_size + 1
        return min(super().max_blocks(tokens), len(self.groups) * pages)

    def find_longest_cache_hit(self, pages: Sequence[int]) -> int:
        """Return the largest `n` such that all pages in the window after the first `n` have blocks.

        pages: page numbers of a cached prefix. The search goes from the longest hit down: only the pages that
            the query after a hit sees need blocks.
        """
        length = len(pages)
        while length:
            first = self.first_needed_page(length * self.block_size)
            missing = [at for at in range(first, length) if not self.has_blocks(pages[at])]
            if not missing:
                break
            length = missing[0]  # all longer hits, up to length, need this page
        return length
