"""The manager of states: which slot holds the state of Gated DeltaNet behind a page's last computed token.

A state has one size, however long the text behind it, and nothing can be taken from it again. So a request
needs one state, that behind its newest computed token, and a prefix hit needs one, that at its end. Both are
kept by page: a step reads the slot of the page before its first token, and writes to the slot of the page
that its last token is in. In the middle of a page that is the same slot, updated in place.

A step of several tokens also saves the state at one place within, its *cut*:

- Before its guesses, if it has any. What is behind them goes nowhere, and the request goes on from the cut:
  guesses that were right are computed again, together with the token behind them.
- Where the prompt parts from one that is cached, so that the next prompt that parts there finds a snapshot.
- Otherwise at the last page boundary.

A state at the end of a page is a snapshot for prefix hits, kept while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.request import Request
from continuous.work import Work
from hybrid_cache.lru_pool import LruPool
from hybrid_cache.managers import Manager, Table


def slot_count(rows: int) -> int:
    """Return the slots of an engine: a row may read one and write another, and as many are snapshots."""
    return 3 * rows


class Slots(LruPool):
    """The slots of states. Running requests need two thirds of them at most."""

    def take(self, count: int) -> list[int]:
        """Take slots that are free, or those of the oldest snapshots."""
        while self.books.free < count:
            self.evict_oldest(self.ends)
        return self.books.allocate(count)


class StateManager(Manager):
    """Books of the states. A page has a slot of its own stock, or none.

    Args:
        tables: of the rows.
        tails: `[pages]` int32; of a step of several tokens that ends in a page, the tokens behind its cut.
            Negative: they are guesses; 0: there is no cut.
        behind: blocks of the pool; slots are numbered behind them where both are copied.
        blocks, changed, limits: as a `Manager`'s; blocks are `[1, pages]` slots.

    parting: by row, how many tokens of its prompt are cached without a snapshot behind them.
    guessed: by row, the cut before guesses that have not landed.
    newest: by row, the page that its decodes have left last. Its snapshot takes the place of the one before.
    """

    def __init__(self, tables: Table, tails: Table, behind: int, *books: Any) -> None:
        super().__init__((), Slots(slot_count(len(tables))), *books)
        self.tables = tables
        self.tails = tails
        self.behind = behind
        self.width = 1
        self.parting, self.newest = [0] * len(tables), [-1] * len(tables)
        self.guessed: dict[int, int] = {}

    # Rules of the kind.

    def first(self, start: int) -> int:
        """The place before the query."""
        return max(0, start - 1) // self.block_size

    def reach(self, start: int, upto: int) -> int:
        """The place before the query: `launch` takes more, and there is always enough."""
        return self.first(start) + 1

    def agrees(self, pages: Sequence[int]) -> int:
        """A hit ends where there is a snapshot."""
        return next((at for at in range(len(pages), 0, -1) if self.has(pages[at - 1])), 0)

    # Requests.

    def cut(self, work: Work) -> int:
        """Return the tokens that the state has seen which a step saves within; `work.start`: it saves none.

        Guesses that are not certain come first: the cut is before them, within a page or not. Otherwise it
        is where the row's prompt parts from a cached one, if the work begins before and ends behind that.
        Otherwise it is the last page boundary before the work's last token, but behind its start.
        """
        start = work.start
        end = work.start + work.count
        parting = self.parting[work.row]
        if work.drafts and not work.drafts_forced:
            return end - len(work.drafts)
        if start < parting < end:
            return parting
        return max(start, (end - 1) // self.block_size * self.block_size)

    def roll_back(self, request: Request, upto: int) -> int:
        """Return how many of the first `upto` tokens, which have landed, the request's state has seen.

        If its guesses were among them, it has seen those before the cut, and the request goes on from there:
        so many count as computed. Guesses land once.
        """
        cut = self.guessed.pop(request.row, upto)
        if cut < upto:
            request.num_computed_tokens = cut
        return cut

    def copy(self, source: int, target: int) -> list[tuple[int, int]]:
        """See `Manager.copy`."""
        pairs = super().copy(source, target)
        return [(one + self.behind, other + self.behind) for one, other in pairs]

    def leave(self, row: int, table: Table, committed: int) -> None:
        """Let go of the state; snapshots stay."""
        super().leave(row, table, committed)
        self.parting[row], self.newest[row] = 0, -1
        self.guessed.pop(row, None)

    def launch(self, works: Sequence[Work]) -> list[tuple[int, bool]]:
        """Give slots to the pages in which the works end, and to those that end at their cuts.

        Returns the pages that the works have read from, and whether these keep a snapshot, for `release`.
        """
        size = self.block_size
        left = list[tuple[int, bool]]()
        cuts = set[int]()
        for work in works:
            row = work.row
            start = work.start
            end = work.start + work.count
            if (
                work.count == 1
                and start % size
                and self.held[row] == (start // size, start // size + 1)
            ):
                continue  # the next token of the same page: nothing changes
            table = self.tables[row]
            cut = self.cut(work)
            guessed = work.drafts and not work.drafts_forced
            place = ((cut if guessed else end) - 1) // size
            page, last = int(table[place]), int(table[(end - 1) // size])
            left += [
                (one, start % size == 0) for one in table[slice(*self.held[row])].tolist()
            ]
            self.held[row] = place, place + 1
            self._use(page)
            if not self.has(page):
                self._change(page, blocks=self.stock.take(1))
            if (
                start > work.request.prompt_len and place * size >= start
            ):  # comes to another page
                if (self, self.newest[row]) in self.stock.ends:
                    self.lose(self.newest[row])
                self.newest[row] = int(table[place - 1])
            if work.count > 1:
                self.tails[last] = cut - end if guessed else (end - cut) * (cut > start)
                self.changed.add(last)
            if guessed:
                self.guessed[row] = cut
            elif cut > start:
                cuts.add(int(table[cut // size - 1]))
        for page in cuts:
            if not self.has(page) and self.stock.available:
                self._change(page, blocks=self.stock.take(1))
            if self.has(page) and not self.users[page]:
                self.stock.ends[self, page] = None
        return [(page, whole or page in cuts) for page, whole in left]

    def release(self, left: Sequence[tuple[int, bool]]) -> None:
        """Let go of what works have read once the device has their slots: it hears of this with the next.

        No work may write to what another one of its step reads.
        """
        for page, keeps in left:
            self._drop(page, self.stock.ends if keeps else None)
