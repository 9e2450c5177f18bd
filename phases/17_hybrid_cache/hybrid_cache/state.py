"""The manager of states: which slot holds the state of Gated DeltaNet behind a page's last computed token.

A state has one size, however long the text behind it, and nothing can be taken from it again. So a request
needs one state, that behind its newest computed token, and a prefix hit needs one, that at its end. Both are
kept by page: a step reads the slot of the page before its first token, and writes to the slot of the page
that its last token is in. In the middle of a page that is the same slot, updated in place. A step that comes
to another page leaves a state at the end of the page before: a snapshot for prefix hits, kept while there is
room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from continuous.work import Work
from hybrid_cache.managers import Manager, ManagerSizes, Table
from hybrid_cache.stock import Stock


class StateMoves(NamedTuple):
    """Changes on the device before a step: pages whose slots are others now, and slots to copy.

    pages: `[n]` int64; slots: `[n]` int32; copies: `[n, 2]` int64, each a source and its target.
    """

    pages: NDArray[np.int64]
    slots: NDArray[np.int32]
    copies: NDArray[np.int64]


def slot_count(rows: int) -> int:
    """Return the slots of an engine: a row may read one and write another, and as many are snapshots."""
    return 3 * rows


class StateManager(Manager):
    """Books of the states. They take slots of their own, and no blocks.

    Args:
        limits: of the engine.
        pages: numbers of pages.
        stock: of the others, from which this one takes nothing.
        tables: of the rows.

    slots: `[pages]`, each page's slot, or `null`, the one behind the last, which is always zeros.
    seen: tokens of each page that its state has seen. A snapshot has seen all.
    idle: snapshots that no running request needs, the oldest first.
    newest: the snapshot that each row's decodes have left last. It takes the place of the one before.
    """

    def __init__(self, limits: ManagerSizes, pages: int, stock: Stock, tables: NDArray[np.int32]) -> None:
        super().__init__((), stock, np.zeros((0, pages), np.int32), set(), limits)
        self.tables, self.null = tables, slot_count(limits.rows)
        self.slots = np.full(pages, self.null, np.int32)
        self.seen = [0] * pages
        self.idle: dict[int, None] = {}
        self.newest = [-1] * limits.rows
        self._free = list(range(self.null))
        self._copies: list[tuple[int, int]] = []
        self._moves: StateMoves

    # Rules of the kind.

    def first(self, start: int) -> int:
        """The place before the query."""
        return max(0, start - 1) // self.block_size

    def reach(self, start: int, upto: int) -> int:
        """None in advance: `launch` takes slots, of which there are always enough."""
        return 0

    def agrees(self, pages: Sequence[int]) -> int:
        """A hit ends where there is a snapshot."""
        return next((at for at in range(len(pages), 0, -1) if self.has(pages[at - 1])), 0)

    def has(self, page: int) -> bool:
        """Return True if there is a state behind the page's last token."""
        return bool(self.slots[page] != self.null) and self.seen[page] == self.block_size

    # Requests.

    def attach(self, row: int, table: Table, start: int) -> None:
        """Begin behind the snapshot that a hit has found, or at the beginning of a text."""
        self._hold(row, table, start)

    def grow(self, row: int, table: Table, start: int, upto: int) -> int:
        """There is room for any number of tokens."""
        return len(table) * self.block_size

    def slide(self, row: int, table: Table, start: int, committed: int) -> None:
        """Nothing is given back before the step that goes on has been launched."""

    def share(self, parent: int, child: int, table: Table, tokens: int) -> None:
        """Let the child go on from the state that its parent has behind `tokens`."""
        self._hold(child, table, tokens)

    def copy(self, source: int, target: int) -> list[tuple[int, int]]:
        """The first of those that share a page takes a copy of its state along."""
        self._take(target)
        self.seen[target] = self.seen[source]
        self._copies.append((int(self.slots[source]), int(self.slots[target])))
        self.users[target] += 1
        self._let_go(source)
        return []

    def swap(self, row: int, place: int, mine: int, theirs: int) -> None:
        """A page of the index gets the snapshot of its twin, if it has none."""
        held = self.held[row] == (place, place + 1)
        if self.has(mine) and not self.has(theirs):
            self._free_slot(theirs)
            self._set(theirs, int(self.slots[mine]))
            self.seen[theirs] = self.block_size
            self._set(mine, self.null)
            if not self.users[theirs]:
                self.idle[theirs] = None
        if held:
            self.idle.pop(theirs, None)
            self.users[theirs] += 1
            self.users[mine] -= 1

    def leave(self, row: int, table: Table, committed: int) -> None:
        """Let go of the state; snapshots stay."""
        self.newest[row] = -1
        for page in table[slice(*self.held[row])].tolist():
            self._let_go(page)
        self.held[row] = 0, 0

    def lose(self, page: int) -> None:
        """The page is no more."""
        self.idle.pop(page, None)
        self._free_slot(page)

    def launch(self, works: Sequence[Work]) -> None:
        """Give slots to the pages in which the works end, and to one snapshot in each prompt.

        What these works read goes only when all of them have their slots, and the device hears of that with
        the next step: no work may write to what another one reads.
        """
        left, snapshots, size = [], [], self.block_size
        for work in works:
            table, end = self.tables[work.row], work.start + work.count
            place = (end - 1) // size
            page = int(table[place])
            left += table[slice(*self.held[work.row])].tolist()
            if work.count > 1:
                self.newest[work.row] = -1
            elif place * size == work.start > 0:
                if self.newest[work.row] in self.idle:
                    self.lose(self.newest[work.row])
                self.newest[work.row] = left[-1]
            self.held[work.row] = place, place + 1
            self.users[page] += 1
            self.idle.pop(page, None)
            if self.slots[page] == self.null:
                self._take(page)
            self.seen[page] = end - place * size
            if place * size > work.start:
                snapshots.append(int(table[place - 1]))
        for page in snapshots:
            if self.slots[page] == self.null and (self._free or self.idle):
                self._take(page)
            self.seen[page] = size  # where it has one: the work may have begun within this page
        pages = np.array(sorted(self.changed), np.int64)
        self.changed.clear()
        copies, self._copies = np.array(self._copies, np.int64).reshape(-1, 2), []
        self._moves = StateMoves(pages, self.slots[pages], copies)
        for page in snapshots:
            if self.has(page) and not self.users[page]:
                self.idle[page] = None
        for page in left:
            self._let_go(page)

    def take_moves(self) -> StateMoves | None:
        """Return what `StatePool.regroup` does before the works launched last; None: nothing."""
        moves = self._moves
        return moves if len(moves.pages) or len(moves.copies) else None

    def _hold(self, row: int, table: Table, start: int) -> None:
        """Make a row a user of the state behind `start` tokens."""
        if start == 0:
            self.held[row] = 0, 0
            return
        place = self.first(start)
        page = int(table[place])
        self.held[row] = place, place + 1
        self.users[page] += 1
        self.idle.pop(page, None)

    def _let_go(self, page: int) -> None:
        """Take a user away. After the last one a snapshot stays, and a state within a page goes."""
        self.users[page] -= 1
        if not self.users[page]:
            if self.has(page):
                self.idle[page] = None
            else:
                self._free_slot(page)

    # Slots.

    def _take(self, page: int) -> None:
        """Give a page a slot that is free, or that of the oldest snapshot."""
        if not self._free:
            self.lose(next(iter(self.idle)))
        self._set(page, self._free.pop())

    def _free_slot(self, page: int) -> None:
        if self.slots[page] != self.null:
            self._free.append(int(self.slots[page]))
            self._set(page, self.null)

    def _set(self, page: int, slot: int) -> None:
        self.slots[page] = slot
        self.changed.add(page)

    def check(self) -> list[int]:
        """Raise `AssertionError` unless every slot is free or one page's; returns no blocks."""
        used = self.slots[self.slots != self.null].tolist()
        if sorted([*used, *self._free]) != list(range(self.null)):
            raise AssertionError(f"slots {sorted(used)} are in use and {sorted(self._free)} free")
        for page in self.idle:
            if self.users[page] or not self.has(page):
                raise AssertionError(f"page {page} has no idle snapshot")
        return []
