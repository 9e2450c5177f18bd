"""The hybrid cache: tables of pages, and for each kind of layers a manager of the blocks behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from continuous.work import Work
from hybrid_cache.layout import LayerGroups
from hybrid_cache.lru_pool import LruPool
from hybrid_cache.managers import FullManager, Manager, ManagerSizes, WindowManager
from hybrid_cache.state import StateManager
from paged_cache.allocator import BlockAllocator
from prefix_cache.cache import PrefixCache
from prefix_cache.index import Match, PrefixIndex
from prefix_cache.radix import RadixIndex


class Moves(NamedTuple):
    """Pages whose blocks have changed: `[n]` int64, and their blocks now, `[groups, n]` int32.

    Two rows more are the slots and tails of states, where layers keep any.
    """

    pages: NDArray[np.int64]
    blocks: NDArray[np.int32]


class Pages(BlockAllocator):
    """The numbers of pages; `died` is called for each that has lost its last user."""

    def __init__(self, count: int, died: Callable[[int], None]) -> None:
        super().__init__(count)
        self._died = died

    def release(self, blocks: Iterable[int]) -> None:
        """See `BlockAllocator`."""
        pages = list(blocks)
        super().release(pages)
        for page in pages:
            if self.refs[page] == 0:
                self._died(page)


class HybridCache(PrefixCache):
    """A `PrefixCache` of pages, whose blocks come and go by the rules of each kind of layers.

    Tables, the index and copies on write are those of phases 05 and 08, with pages in the place of blocks:
    numbers that cost nothing. Room is a matter of blocks, which the managers of attention take from one
    stock. So what a window gives back serves any other request. States have a stock of their own, since a
    state is larger than a block.

    Args:
        rows, max_len, block_size, watermark: see `PrefixCache`.
        index: see there; None: nothing outlives its request.
        blocks: blocks of the pool, of one group's layers each, the null block included.
        layout: groups of layers.
        step_tokens: tokens of one request in a step, at most.
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
        watermark: float = 0.01,
    ) -> None:
        pages = page_count(layout, blocks, rows, -(-max_len // block_size))
        super().__init__(
            rows, max_len, pages, block_size, index or RadixIndex(), watermark=watermark
        )
        self._keeps = index is not None
        self.allocator = Pages(pages, self._died)
        self.stock = LruPool(blocks - 1)
        count = len(layout.groups)
        self.blocks: NDArray[np.int32] = np.zeros(
            (count + 2 * (layout.states is not None), pages), np.int32
        )
        self._changed: set[int] = set()
        self._block_copies: list[tuple[int, list[tuple[int, int]]]] = []  # by page
        self.kinds: list[Manager] = []  # of attention, in the order of the layout
        limits = ManagerSizes(rows, block_size, step_tokens)
        at = 0
        for kind, groups in layout.kinds.items():
            own = self.blocks[at : at + len(groups)]
            at += len(groups)
            manager = FullManager if kind is None else partial(WindowManager, kind)
            self.kinds.append(manager(groups, self.stock, own, self._changed, limits))
        self.width, self.states = at, None
        self.managers = self.kinds.copy()
        if layout.states is not None:
            slots, tails = self.blocks[at : at + 1], self.blocks[-1]
            self.states = StateManager(
                self.tables, tails, blocks, slots, self._changed, limits
            )
            self.managers.append(self.states)

    # Room, in blocks.

    def holds(self, tokens: int) -> bool:
        """See `PagedCache.holds`."""
        most = sum(kind.most(tokens) for kind in self.kinds)
        return (
            most <= self.stock.books.count and self.blocks_for(tokens) <= self.tables.shape[1]
        )

    def fits(self, request: Request) -> bool:
        """Return True if all managers find the blocks that the request pins when it begins."""
        if self.stock.spare < 1:
            return False
        pages = self._match(request).blocks
        start, upto = len(pages) * self.block_size, len(request.tokens)
        return sum(kind.cost(pages, start, upto) for kind in self.kinds) <= self.stock.spare

    def _match(self, request: Request) -> Match:
        """Find as much as the index knows and all managers agree on."""
        found = super()._match(request)
        return Match(found.blocks[: self.agree(found.blocks)], found.unpinned)

    def agree(self, pages: Sequence[int]) -> int:
        """Return the longest length, in pages, that every manager can begin behind.

        A manager that shortens a hit may take from it what another needs, so all are asked again until none
        shortens it.
        """
        length = len(pages)
        while True:
            shortest = min(manager.agrees(pages[:length]) for manager in self.managers)
            if shortest == length:
                return length
            length = shortest

    def grow(self, request: Request, upto: int) -> bool:
        """First give back what windows have passed, then take pages, and blocks for them."""
        row = request.row
        table = self.tables[request.row]
        start = request.num_computed_tokens
        new = self._cursors[row] is None
        if not new:
            for kind in self.kinds:
                kind.slide(row, table, start, self._committed[row])
            if self._lacking(row, start, upto) > self.stock.available:
                return False
        elif self.states is not None:
            known = super()._match(request)  # agreed on or not
            self.states.parting[row] = len(known.blocks) * self.block_size
        if not super().grow(request, upto):
            return False
        if new:
            for manager in self.managers:
                manager.attach(row, table, start)
        for source, target in super().take_copies():
            self._make_room(self.width)
            pairs = [
                pair for manager in self.managers for pair in manager.copy(source, target)
            ]
            self._block_copies.append((target, pairs))
        self._make_room(self._lacking(row, start, upto))
        self._writable[row] = min(kind.grow(row, table, start, upto) for kind in self.kinds)
        return True

    def _lacking(self, row: int, start: int, upto: int) -> int:
        """Return the blocks that the kinds take."""
        return sum(kind.lacks(row, self.tables[row], start, upto) for kind in self.kinds)

    def _make_room(self, count: int) -> None:
        """Free blocks that no running request needs, until so many are free.

        There are two kinds: of pages that a window has slid past, which only a hit that ends there would
        want, and of the ends of cached sequences. The kind of which there are more pages gives the oldest.
        """
        stock = self.stock
        while stock.books.free < count:
            if stock.slid and len(stock.slid) >= self.index.evictable:
                stock.evict_oldest(stock.slid)
            elif pages := self.index.evict(1):
                self.stats.evicted_blocks += len(pages)
                self.allocator.release(pages)
            else:
                stock.evict_oldest(stock.slid or stock.ends)

    def _died(self, page: int) -> None:
        for manager in self.managers:
            manager.lose(page)

    # Requests.

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """See `PagedCache.fork`; the child's queries begin behind `tokens`."""
        super().fork(parent, child, tokens)
        for manager in self.managers:
            manager.share(parent.row, child.row, self.tables[child.row], tokens)

    def commit(self, request: Request, upto: int) -> None:
        """See `PrefixCache.commit`. A page of the index without blocks gets those of its twin."""
        if self.states is not None:
            upto = self.states.roll_back(request, upto)
        if not self._keeps:
            return
        row, first = request.row, self._committed[request.row]
        own: list[int] = self.tables[row, first : upto // self.block_size].tolist()
        if not own:
            return
        self.allocator.retain(own)  # a page that dies takes its blocks along
        super().commit(request, upto)
        for place, mine in enumerate(own, first):
            theirs = int(self.tables[row, place])
            if mine != theirs:
                for manager in self.managers:
                    manager.swap(row, place, mine, theirs)
        self.allocator.release(own)

    def release(self, request: Request) -> None:
        """See `PrefixCache.release`."""
        row = request.row
        for manager in self.managers:
            manager.leave(row, self.tables[row], self._committed[row])
        gone = set(self.blocks_of(row))
        self._block_copies = [copy for copy in self._block_copies if copy[0] not in gone]
        super().release(request)

    # What the runner takes.

    def take_moves(self, works: Sequence[Work]) -> Moves | None:
        """Return what `HybridPool.regroup` sends to the device before these works run; None: nothing."""
        left = [] if self.states is None else self.states.launch(works)
        pages = np.array(sorted(self._changed), np.int64)
        self._changed.clear()
        moves = Moves(pages, self.blocks[:, pages]) if len(pages) else None
        if self.states is not None:
            self.states.release(left)
        return moves

    def take_copies(self) -> list[tuple[int, int]]:
        """See `PagedCache.take_copies`: pairs of blocks."""
        copies, self._block_copies = self._block_copies, []
        return [pair for _, pairs in copies for pair in pairs]

    def take_fresh(self) -> list[int]:
        """See `PagedCache.take_fresh`: blocks."""
        self._fresh.clear()
        fresh, self.stock.fresh = self.stock.fresh, []
        return fresh

    def check(self) -> None:
        """Also: every block in use is of one page and group, and all that requests need is there."""
        super().check()
        for stock in {manager.stock for manager in self.managers}:
            own = [manager for manager in self.managers if manager.stock is stock]
            stock.books.check(block for manager in own for block in manager.check())
        for manager in self.managers:
            held = [0] * self.allocator.count
            for row, (first, end) in enumerate(manager.held):
                for page in self.tables[row, first:end].tolist():
                    held[page] += 1
            if held != manager.users:
                raise AssertionError("a page has other users than the requests that hold it")


def page_count(layout: LayerGroups, blocks: int, rows: int, places: int) -> int:
    """Return how many pages there may be, so that blocks run out first.

    A page has a block of each group that keeps everything. Without such a group it may have none at all: then
    every place in the tables may have a page.
    """
    kept = len(layout.kinds.get(None, ()))
    return blocks // kept if kept else blocks + rows * places
