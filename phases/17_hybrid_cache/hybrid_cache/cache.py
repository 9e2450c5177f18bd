"""The hybrid cache: block tables of pages (`block_size` tokens), and layers' blocks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from continuous.work import Work
from hybrid_cache.groups import LayerGroups
from hybrid_cache.states.manager import StateManager
from hybrid_cache.windows.lru_pool import LruPool
from hybrid_cache.windows.manager import (
    FullAttentionManager,
    ManagerSizes,
    SingleTypeManager,
    SlidingWindowManager,
)
from paged_cache.allocator import BlockAllocator
from prefix_cache.cache import PrefixCache
from prefix_cache.index import Match, PrefixIndex
from prefix_cache.radix import RadixIndex


class Moves(NamedTuple):
    """An update of the device's table of blocks by page (a page: `block_size` tokens, named in block tables).

    pages: `[n]` int64, the pages whose blocks changed. blocks: `[groups, n]` int32, the blocks that they have
        now; for models with Gated DeltaNet two rows more: state slots, and the number of a step's tokens
        after its snapshot boundary (the position whose state is kept).
    """

    pages: NDArray[np.int64]
    blocks: NDArray[np.int32]


class PageAllocator(BlockAllocator):
    """A free list of page numbers `0 .. count - 1`, which calls `on_free` with each page that gets free."""

    def __init__(self, count: int, on_free: Callable[[int], None]) -> None:
        super().__init__(count)
        self._on_free = on_free

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each of these pages; free those without users, and call `on_free` with each.

        blocks: page numbers (the base class calls them blocks).
        """
        pages = list(blocks)
        super().release(pages)
        for page in pages:
            if self.refs[page] == 0:
                self._on_free(page)


class HybridCache(PrefixCache):
    """The scheduler's KV cache for models whose layers differ: full attention, sliding windows, states.

    rows, max_len: most running requests, and most tokens of each. index: finds cached prefixes; None: no
        prefix is kept. block_size: tokens of a page.
    blocks: number of blocks of the pool, of one group's layers each, the null block (all zeros) included.
    layout: groups of layers. step_tokens: most tokens of one request in a step.

    It is a `PrefixCache` of pages: numbers that cost no memory, in block tables and in the index. Each
    type of layers gives a page memory, and takes it back, by its own rules: attention takes blocks from
    one pool, so what a window frees serves any other request; states have a pool of slots, because a
    state is larger than a block.

    Attributes:
        block_pool: the pool of blocks that all attention layers share.
        blocks: `[groups, pages]` int32, the block of each page; with states two rows more: the state slot of
            each page, and the number of a step's tokens after its snapshot boundary.
        attention_managers: one for each type of attention, in the order of the layout.
        state_manager: of layers that keep states; None: there are none.
    """

    def __init__(
        self,
        rows: int,
        max_len: int,
        blocks: int,
        block_size: int,
        index: PrefixIndex | None,
        layout: LayerGroups,
        *,
        step_tokens: int,
    ) -> None:
        pages = page_count(layout, blocks, rows, -(-max_len // block_size))
        super().__init__(rows, max_len, pages, block_size, index or RadixIndex())
        self._keeps = index is not None
        self.allocator = PageAllocator(pages, self._evict_page)
        self.block_pool = LruPool(blocks - 1)
        count = len(layout.groups)
        self.blocks: NDArray[np.int32] = np.zeros(
            (count + 2 * (layout.states is not None), pages), np.int32
        )
        self._changed: set[int] = set()
        self._block_copies: list[tuple[int, list[tuple[int, int]]]] = []  # by page
        sizes = ManagerSizes(rows, block_size, step_tokens)
        self.attention_managers: list[SingleTypeManager] = []
        self.num_groups = 0
        for window, groups in layout.by_window.items():
            own = self.blocks[self.num_groups : self.num_groups + len(groups)]
            self.num_groups += len(groups)
            manager = (
                FullAttentionManager
                if window is None
                else partial(SlidingWindowManager, window)
            )
            self.attention_managers.append(
                manager(groups, self.block_pool, own, self._changed, sizes)
            )
        self.managers = self.attention_managers.copy()
        self.state_manager: StateManager | None = None
        if layout.states is not None:
            slots, tokens_after = self.blocks[count : count + 1], self.blocks[-1]
            self.state_manager = StateManager(
                self.tables, tokens_after, blocks, slots, self._changed, sizes
            )
            self.managers.append(self.state_manager)

    # Room, in blocks.

    def holds(self, tokens: int) -> bool:
        """Return True if a request could keep `tokens` tokens if it had the whole cache for itself."""
        most = sum(manager.max_blocks(tokens) for manager in self.attention_managers)
        fits_table = self.blocks_for(tokens) <= self.tables.shape[1]
        return most <= self.block_pool.allocator.count and fits_table

    def fits(self, request: Request) -> bool:
        """Return True if a waiting request can begin: its blocks are free, or cached ones can be evicted."""
        if self.block_pool.admissible < 1:
            return False
        pages = self._match(request).blocks
        start, upto = len(pages) * self.block_size, len(request.tokens)
        needed = sum(
            manager.num_blocks_to_admit(pages, start, upto)
            for manager in self.attention_managers
        )
        return needed <= self.block_pool.admissible

    def _match(self, request: Request) -> Match:
        """Return a request's cached prefix, cut to a length after which layers of every type can begin."""
        found = super()._match(request)
        length = self.find_longest_cache_hit(found.blocks)
        return Match(found.blocks[:length], found.unpinned)

    def find_longest_cache_hit(self, pages: Sequence[int]) -> int:
        """Return the largest `n` such that every type of layers can begin after the first `n` of these
        cached pages.

        A type of layers that shortens a hit may cut pages that another type needs, so all are asked again
        until none shortens the hit.
        """
        length = len(pages)
        while True:
            shortest = min(
                manager.find_longest_cache_hit(pages[:length]) for manager in self.managers
            )
            if shortest == length:
                return length
            length = shortest

    def grow(self, request: Request, upto: int) -> bool:
        """Allocate pages and blocks for a request's first `upto` tokens.

        Before that, its blocks before sliding windows are freed.

        Returns:
            True; or False, with nothing allocated, if there are not enough blocks.
        """
        row = request.row
        table = self.tables[row]
        start = request.num_computed_tokens
        new = self._cursors[row] is None
        if not new:
            for manager in self.attention_managers:
                manager.remove_skipped_blocks(row, table, start, self._committed[row])
            if self._num_blocks_to_allocate(row, start, upto) > self.block_pool.available:
                return False
        elif self.state_manager is not None:
            known = super()._match(request)  # with a snapshot behind it or not
            self.state_manager.divergence[row] = len(known.blocks) * self.block_size
        if not super().grow(request, upto):
            return False
        if new:
            for manager in self.managers:
                manager.attach(row, table, start)
        self._copy_shared_pages()
        self._evict_until_free(self._num_blocks_to_allocate(row, start, upto))
        self._writable[row] = min(
            manager.allocate_blocks(row, table, start, upto)
            for manager in self.attention_managers
        )
        return True

    def _num_blocks_to_allocate(self, row: int, start: int, upto: int) -> int:
        """Return how many more blocks a request needs from the pool for its first `upto` tokens.

        row: of the request in the block tables. start: its number of computed tokens.
        """
        table = self.tables[row]
        return sum(
            manager.num_blocks_to_allocate(row, table, start, upto)
            for manager in self.attention_managers
        )

    def _copy_shared_pages(self) -> None:
        """Give blocks to new pages that replace shared ones (copy on write).

        `take_copies` then returns the copies to make.
        """
        for source, target in super().take_copies():
            self._evict_until_free(self.num_groups)
            pairs = [
                pair for manager in self.managers for pair in manager.copy_page(source, target)
            ]
            self._block_copies.append((target, pairs))

    def _evict_until_free(self, count: int) -> None:
        """Evict cached blocks that no request uses, until `count` blocks are free.

        Such blocks are in two lists: those before a sliding window, which only a hit that ends there needs,
        and those at the ends of cached sequences. The oldest block of the longer list is evicted first.
        """
        pool = self.block_pool
        while pool.allocator.free < count:
            if pool.skipped and len(pool.skipped) >= self.index.evictable:
                pool.evict_oldest(pool.skipped)
            elif pages := self.index.evict(1):
                self.stats.evicted_blocks += len(pages)
                self.allocator.release(pages)
            else:
                pool.evict_oldest(pool.skipped or pool.finished)

    def _evict_page(self, page: int) -> None:
        for manager in self.managers:
            manager.evict(page)

    # Requests.

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let the request `child` share the pages and blocks of its parent's first `tokens` tokens."""
        super().fork(parent, child, tokens)
        for manager in self.managers:
            manager.attach(child.row, self.tables[child.row], tokens)

    def commit(self, request: Request, upto: int) -> None:
        """Put the full pages of a request's first `upto` tokens into the prefix index.

        Where the index has a page of the same tokens already, the request uses that page instead of its own.
        If the index's page has lost its blocks, it gets those of the request's page.
        """
        if self.state_manager is not None:
            upto = self.state_manager.roll_back(request, upto)
        if not self._keeps:
            return
        row, first = request.row, self._committed[request.row]
        own: list[int] = self.tables[row, first : upto // self.block_size].tolist()
        if not own:
            return
        self.allocator.retain(own)  # a page that is freed takes its blocks along
        super().commit(request, upto)
        for at, mine in enumerate(own, first):
            shared = int(self.tables[row, at])
            if mine != shared:
                for manager in self.managers:
                    manager.replace_page(row, at, mine, shared)
        self.allocator.release(own)

    def release(self, request: Request) -> None:
        """Free the pages and blocks of an ended request; pages that are in the prefix index stay cached."""
        row = request.row
        for manager in self.managers:
            manager.release_row(row, self.tables[row], self._committed[row])
        pages = set(self.blocks_of(row))
        self._block_copies = [copy for copy in self._block_copies if copy[0] not in pages]
        super().release(request)

    # What the runner takes.

    def take_moves(self, works: Sequence[Work]) -> Moves | None:
        """Return the pages whose blocks changed since the last call, with their blocks now; None if none did.

        The runner updates the device's table of blocks by page.
        works: the step's requests with their tokens. This call chooses the state slots that they read and
            write.
        """
        read = [] if self.state_manager is None else self.state_manager.assign_slots(works)
        pages = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        moves = Moves(pages, self.blocks[:, pages]) if len(pages) else None
        if self.state_manager is not None:
            self.state_manager.release_slots(read)
        return moves

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the copies that the device must make before the next step.

        Returns:
            (source, target) pairs of block numbers; state slots are numbered after all blocks.
        """
        copies, self._block_copies = self._block_copies, []
        return [pair for _, pairs in copies for pair in pairs]

    def take_fresh(self) -> list[int]:
        """Return the numbers of blocks allocated since the last call, which still hold old keys."""
        self._fresh.clear()
        fresh, self.block_pool.fresh = self.block_pool.fresh, []
        return fresh

    def check(self) -> None:
        """Raise `AssertionError` unless each block belongs to one page and group, and requests have the
        blocks they need.
        """
        super().check()
        for pool in {manager.pool for manager in self.managers}:
            own = [manager for manager in self.managers if manager.pool is pool]
            pool.allocator.check(block for manager in own for block in manager.check())
        for manager in self.managers:
            needed = [0] * self.allocator.count
            for row, (first, end) in enumerate(manager.ranges):
                for page in self.tables[row, first:end].tolist():
                    needed[page] += 1
            if needed != manager.users:
                raise AssertionError("a page has other users than the requests that need it")


def page_count(layout: LayerGroups, blocks: int, rows: int, table_width: int) -> int:
    """Return how many page numbers a cache needs, so that its blocks run out first.

    layout: groups of layers. blocks: number in the pool. rows, table_width: sizes of the block tables.
    A page has a block of each group with full attention. Without such a group a page may have no block at
    all: then every entry of the block tables, `rows` times `table_width`, may have a page.
    """
    full = len(layout.by_window.get(None, ()))
    return blocks // full if full else blocks + rows * table_width
