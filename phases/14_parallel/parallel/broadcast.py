"""A step in ranks: rank 0 schedules it and broadcasts its two halves, and the other ranks run the same.

Only rank 0 has requests, a scheduler, drafts and grammars. All that a runner reads besides is what the device
does not know yet: requests that are new in their rows, and changes of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from common.request import Request
from common.sampling.sampler import TokenBitmask
from continuous.rows import RequestRows
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from forward.model import Model
from paged_cache import PagedAttention, PagedRunner
from paged_cache.cache import PagedCache
from parallel.messages import CacheChanges, ForwardMessage, SampleMessage, with_rows
from parallel.worker_group import WorkerGroup


class StepCache:
    """The part of the cache that a rank's runner sees: block tables, and what to do before the next step.

    Rank 0 collects the changes from the scheduler's cache. All ranks apply them, and a runner takes them.

    tables, block_size, blocks_for: see `PagedCache`.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.tables = cache.tables
        self.block_size = cache.block_size
        self.blocks_for = cache.blocks_for
        self._sent = np.zeros_like(self.tables)
        self.moves: Any = None
        self.fresh: list[int] = []
        self.copies: list[tuple[int, int]] = []

    def collect(self, works: Sequence[Work]) -> CacheChanges:
        """Return the changes that all ranks must apply before a step, and take them from rank 0's cache.

        works: the step's requests and tokens. Of the tables these are the entries that the works read and
            that differ from what was returned last for the same entries.
        """
        rows = np.array([work.row for work in works])
        width = self.blocks_for(max(work.start + work.count for work in works))
        now = self.tables[rows, :width]
        lines, columns = np.nonzero(now != self._sent[rows, :width])
        changed, blocks = rows[lines], now[lines, columns]
        self._sent[changed, columns] = blocks
        moves = self.cache.take_moves(works)
        fresh = self.cache.take_fresh()
        return CacheChanges(changed, columns, blocks, moves, fresh, self.cache.take_copies())

    def apply(self, changes: CacheChanges) -> None:
        """Write the changed entries of the tables, and keep the rest until the runner takes it."""
        self.tables[changes.rows, changes.columns] = changes.blocks
        self.moves, self.fresh, self.copies = changes[3:]

    def take_moves(self, works: Sequence[Work]) -> Any:
        """Return what changed in the groups of layers since the last step, as rank 0 sent it."""
        moves, self.moves = self.moves, None
        return moves

    def take_fresh(self) -> list[int]:
        """Return the blocks that got a new owner since the last step, as rank 0 sent them."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) blocks to copy before the next step, as rank 0 sent them."""
        copies, self.copies = self.copies, []
        return copies


class BroadcastExecutor:
    """Rank 0's first executor: it broadcasts each half of a step to the other ranks, then lets the
    others run it.
    """

    order: ClassVar[int] = 0

    def __init__(self, runner: PagedRunner, cache: StepCache, workers: WorkerGroup) -> None:
        self.runner = runner
        self.cache = cache
        self.workers = workers
        self.others = runner.executors

    def supports(self, works: Sequence[Work], masked: bool) -> bool:
        """Return `masked` as the ticket for any step. (Only None would leave the step to the other
        executors.)
        """
        return masked

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Broadcast the first half of a step, and run it by the first other executor that supports it.

        The second half that it returns is broadcast as well.
        """
        requests = [bare(request) for request in self.runner.rows.fresh.values()]
        changes = self.cache.collect(works)
        stained = self.runner.attention.pool.stained
        own = [with_rows(work) for work in works]
        self.workers.broadcast(ForwardMessage(own, ticket, requests, changes, stained))
        self.cache.apply(changes)
        asked = ((other, other.supports(works, ticket)) for other in self.others)
        found = next((pair for pair in asked if pair[1] is not None), None)
        step = self.runner.eager(works) if found is None else found[0].run(works, found[1])
        return replace(step, rest=partial(self.sample, step))

    def sample(self, step: Forwarded, allowed: TokenBitmask | None) -> Pending:
        """Broadcast that a step is sampled and whether with masks, and sample it."""
        self.workers.broadcast(SampleMessage(masked=allowed is not None))
        return self.runner.sample(step, allowed)


class StepWorker:
    """Runs the halves of steps that rank 0 broadcasts, on every other rank."""

    def __init__(self, runner: PagedRunner, cache: StepCache) -> None:
        self.runner = runner
        self.cache = cache
        device = runner.model.device
        words = -(-runner.model.config.vocab_size // 32)
        self._no_masks = TokenBitmask(
            torch.zeros(0, words, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
        )
        self._step: Forwarded

    def forward(self, message: ForwardMessage) -> None:
        """Run the first half of a step, after its new requests and changes of the cache are known here."""
        rows = self.runner.rows
        for request in message.requests:
            rows.fresh[request.row] = request
            rows.prompt_lens[request.row] = request.prompt_len
        self.cache.apply(message.changes)
        self.runner.attention.pool.stained = message.stained
        self._step = self.runner.forward(message.works, masked=message.masked)

    def sample(self, message: SampleMessage) -> None:
        """Run the second half of the step; rank 0 alone has masks, and its tokens count where it has any."""
        self.runner.sample(self._step, self._no_masks if message.masked else None)


def bare(request: Request) -> Request:
    """Return a copy of a request with all that a runner reads of it, and nothing that is large."""
    return Request(
        request.id,
        request.tokens,
        request.prompt_len,
        request.limit,
        replace(request.params, grammar=None),
        seed=request.seed,
        row=request.row,
    )


def runner_in_ranks(
    make: Callable[..., PagedRunner],
    workers: WorkerGroup | None,
    model: Model,
    attention: PagedAttention,
    rows: RequestRows,
    cache: PagedCache,
    **options: Any,
) -> PagedRunner:
    """Return a rank's runner, which reads a `StepCache`; on rank 0 it broadcasts its steps.

    make: makes the runner. workers: the other ranks, on rank 0; None on all others.
    """
    seen = StepCache(cache)
    runner = make(model, attention, rows, seen, **options)
    if workers is not None:
        runner.ask_first(BroadcastExecutor(runner, seen, workers))
    return runner
