"""Which slot holds the state of Gated DeltaNet after a page's tokens: snapshots and rollback.

1. A slot holds one state, of all layers. A state is saved in the slot of the page of the last token in it.
2. A step reads the slot of the page of the token before it. It saves the state after its last token.
3. Within a page both are one slot, updated in place. A step that enters another page leaves a snapshot.
4. A step of several tokens can also save the state at one point within, its *snapshot boundary*:
5. before draft tokens that may be rejected, if it has any: then it saves no later state;
6. else where the prompt leaves what the prefix index knows, so that the next such prompt finds a snapshot;
7. else at the last page boundary before its last token, if that is after its start.
8. Rollback: the request continues from rule 5's boundary. It computes accepted drafts again, together with
   the token after them.
9. A prefix hit ends where a page has a snapshot. Of a request's decodes only the newest snapshot stays.
10. No request writes a slot that another one reads in the same step: slots are released after the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.request import Request
from continuous.work import Work
from hybrid_cache.windows.lru_pool import LruPool
from hybrid_cache.windows.manager import SingleTypeManager, Table


def slot_count(rows: int) -> int:
    """Return the number of state slots that `rows` running requests need: each may read one and write one,
    and keep a snapshot.
    """
    return 3 * rows


class SlotPool(LruPool):
    """A pool of state slots, which evicts the oldest snapshots of states when it has no free slot.

    Running requests need at most two thirds of the slots, so one is always free or evictable.
    """

    def take(self, count: int) -> list[int]:
        """Allocate `count` slots, if need be those of the oldest snapshots; return their numbers."""
        while self.allocator.free < count:
            self.evict_oldest(self.finished)
        return self.allocator.allocate(count)


class StateManager(SingleTypeManager):
    """The manager of state slots for Gated DeltaNet layers: a page may have one, for the state after it.

    A page is a number in block tables for `block_size` tokens.

    tables: block tables of all rows. arguments: of the base class, such as `blocks [1, pages]`, here the slot
        of each page.
    tokens_after: `[pages]` int32, for a step of several tokens that ends in a page: how many of them
        come after the position whose state is kept. Negative if these are drafts; 0 if none is kept.
    slot_offset: number of KV blocks, added to slot numbers where blocks and slots share one list of copies.

    divergence: by row, how many tokens of its prompt are in the prefix index, with a snapshot or without.
    rollback_to: by row, tokens that the state has seen before drafts that are being verified.
    last_decode_page: by row, the last page that its decodes have filled, or -1.
    """

    def __init__(
        self, tables: Table, tokens_after: Table, slot_offset: int, *arguments: Any
    ) -> None:
        super().__init__([[]], SlotPool(slot_count(len(tables))), *arguments)
        self.tables = tables
        self.tokens_after = tokens_after
        self.slot_offset = slot_offset
        self.divergence, self.last_decode_page = [0] * len(tables), [-1] * len(tables)
        self.rollback_to: dict[int, int] = {}

    # Rules of the type.

    def first_needed_page(self, start: int) -> int:
        """Return the index in a request's table of the page whose state a step from token `start` reads."""
        return max(0, start - 1) // self.block_size

    def required_pages(self, start: int, upto: int) -> int:
        """Return how many pages of a request's table must have slots before a step: up to the page it reads.

        start: number of the request's computed tokens. upto: not used (`assign_slots` gives slots to the
            pages that the step writes).
        """
        return self.first_needed_page(start) + 1

    def find_longest_cache_hit(self, pages: Sequence[int]) -> int:
        """Return the largest `n` such that the `n`-th of these cached pages has a snapshot after it; 0 if
        none has.
        """
        lengths = range(len(pages), 0, -1)
        return next((at for at in lengths if self.has_blocks(pages[at - 1])), 0)

    # Snapshots and rollback.

    def snapshot_boundary(self, work: Work) -> int:
        """Return after how many tokens of its request a step saves the state as a snapshot.

        work: one request's tokens in the step, from its token `work.start` on.

        Returns:
            The end of these tokens minus the number of drafts (`work.drafts` is a tuple of tokens), if there
            are drafts and they may be rejected (`work.drafts_forced` is False). Otherwise the row's
            `divergence` (prompt tokens in the prefix index), if it lies strictly within the work. Otherwise
            the last page boundary before the work's last token, or `work.start`, which means no snapshot, if
            that boundary is not after the start.
        """
        start = work.start
        end = work.start + work.count
        divergence = self.divergence[work.row]
        if work.drafts and not work.drafts_forced:
            return end - len(work.drafts)
        if start < divergence < end:
            return divergence
        return max(start, (end - 1) // self.block_size * self.block_size)

    def roll_back(self, request: Request, upto: int) -> int:
        """Return how many of a request's first `upto` tokens its state has seen; set the request back to it.

        upto: number of tokens that are computed and accepted.
        If drafts were among the tokens of the request's last step, `rollback_to` has for its row the number
        of tokens that the state has seen. If this is less than `upto`, `request.num_computed_tokens` is set
        back to it. Each entry is used once. An `upto` below the entry is of an earlier step, and is returned.
        """
        seen = self.rollback_to.get(request.row, upto)
        if upto < seen:  # an earlier chunk, collected when the drafts are launched
            return upto
        self.rollback_to.pop(request.row, None)
        if seen < upto:
            request.num_computed_tokens = seen
        return seen

    def assign_slots(self, works: Sequence[Work]) -> list[tuple[int, bool]]:
        """Allocate state slots for the pages (ranges of tokens) that a step's requests write.

        works: the step's requests and their tokens.

        Returns:
            (page, keep) for each page that the step reads; keep: its state stays cached as a snapshot. Pass
            the list to `release_slots` once the device has the slots.
        """
        read = list[tuple[int, bool]]()
        snapshots = set[int]()
        for work in works:
            start = work.start
            at = start // self.block_size
            within = work.count == 1 and start % self.block_size
            if within and self.ranges[work.row] == (at, at + 1):
                continue  # the next token of the same page: nothing changes
            table = self.tables[work.row]
            whole = start % self.block_size == 0
            read += [(page, whole) for page in table[slice(*self.ranges[work.row])].tolist()]
            boundary = self.snapshot_boundary(work)
            drafting = bool(work.drafts) and not work.drafts_forced
            self._write_page(work, boundary if drafting else start + work.count)
            if work.count > 1:
                self._set_tail(work, boundary, drafting)
            if drafting:
                self.rollback_to[work.row] = boundary
            elif boundary > start:
                snapshots.add(int(table[boundary // self.block_size - 1]))
        for page in snapshots:
            if not self.has_blocks(page) and self.pool.available:
                self._change(page, blocks=self.pool.take(1))
            if self.has_blocks(page) and not self.users[page]:
                self.pool.finished[self, page] = None
        return [(page, whole or page in snapshots) for page, whole in read]

    def _write_page(self, work: Work, tokens: int) -> None:
        """Allocate a state slot for the page that holds the last of the first `tokens` tokens of a request.

        work: the request's tokens in the step.
        """
        row = work.row
        at = (tokens - 1) // self.block_size
        page = int(self.tables[row, at])
        self.ranges[row] = at, at + 1
        self._use(page)
        if not self.has_blocks(page):
            self._change(page, blocks=self.pool.take(1))
        if work.start > work.request.prompt_len and at * self.block_size >= work.start:
            if (self, self.last_decode_page[row]) in self.pool.finished:
                self.evict(self.last_decode_page[row])
            self.last_decode_page[row] = int(self.tables[row, at - 1])

    def _set_tail(self, work: Work, boundary: int, drafting: bool) -> None:
        """Set `tokens_after` of a step's last page: the step's tokens after its snapshot boundary.

        The boundary is the position whose state is kept.

        work: the request and its tokens. boundary: number of the request's tokens before it. drafting: True
            if the tokens after it are drafts; the entry is then negative.
        """
        end = work.start + work.count
        last = int(self.tables[work.row, (end - 1) // self.block_size])
        behind = end - boundary if boundary > work.start else 0
        self.tokens_after[last] = boundary - end if drafting else behind
        self.changed.add(last)

    def release_slots(self, read: Sequence[tuple[int, bool]]) -> None:
        """Remove a step's use of the pages whose states it read; slots that keep no snapshot become free.

        read: (page, keep) pairs, as `assign_slots` returned them; keep: the slot stays cached as a snapshot.
        """
        for page, snapshot in read:
            self._drop(page, self.pool.finished if snapshot else None)

    # Requests.

    def copy_page(self, source: int, target: int) -> list[tuple[int, int]]:
        """Let a request use the state slot of a new page `target` instead of the shared page `source`'s.

        This is copy on write.

        Returns:
            The (source, target) slots that the device must copy, numbered after all KV blocks.
        """
        pairs = super().copy_page(source, target)
        return [(one + self.slot_offset, other + self.slot_offset) for one, other in pairs]

    def release_row(self, row: int, table: Table, committed: int) -> None:
        """Remove an ended request's use of its state slots; snapshots stay cached.

        row: of the request in the block tables. table: its page numbers. committed: how many of these are in
            the prefix index.
        """
        super().release_row(row, table, committed)
        self.divergence[row], self.last_decode_page[row] = 0, -1
        self.rollback_to.pop(row, None)
