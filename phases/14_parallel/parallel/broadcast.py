"""A step in ranks: rank 0 schedules it and broadcasts its two halves, and the other ranks run the same.

Only rank 0 has requests, a scheduler, drafts and grammars. All that a runner reads besides is what the device
does not know yet: requests that are new in their rows, and changes of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from paged_cache.runner import StepExecutor, run_by_first
from parallel.messages import CacheChanges, ForwardMessage, SampleMessage, with_rows
from parallel.worker_group import WorkerGroup


class StepCache:
    """The part of the cache that a rank's runner sees: block tables, and what to do before the next step.

    Rank 0 collects the changes from the scheduler's cache. All ranks apply them, and a runner takes them.

    tables: `[rows, most blocks of a request]` int32, block numbers. block_size: tokens of a block.
    blocks_for: function from a number of tokens to the number of blocks that hold them.
    moves, fresh, copies: what the `take_` methods return next.
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

        works: the step's requests and tokens. Of the block tables, only those entries are returned that the
            step reads and that differ from what was returned last.
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
        """Write the changed entries to the block tables, and keep the other changes until the runner takes
        them.
        """
        self.tables[changes.rows, changes.columns] = changes.blocks
        self.moves, self.fresh, self.copies = changes[3:]

    def take_moves(self, works: Sequence[Work]) -> Any:
        """Return the changes of the hybrid cache's page tables since the last step, as rank 0 sent them;
        None: none.
        """
        moves, self.moves = self.moves, None
        return moves

    def take_fresh(self) -> list[int]:
        """Return the numbers of the blocks that got a new owner since the last step, as rank 0 sent them."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) blocks to copy before the next step, as rank 0 sent them."""
        copies, self.copies = self.copies, []
        return copies


@dataclass(eq=False)
class BroadcastExecutor:
    """Rank 0's first executor: broadcasts each half of a step (forward pass, sampling) to the other ranks,
    then runs it by the runner's other executors.
    """

    order: ClassVar[int] = 0
    runner: PagedRunner
    cache: StepCache
    workers: WorkerGroup
    others: Sequence[StepExecutor]

    def supports(self, works: Sequence[Work], masked: bool) -> bool:
        """Return `masked`: this executor runs every step. (Only None would leave a step to the others.)

        works: the step's requests and tokens. masked: whether grammars may mask its samples.
        """
        return masked

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Broadcast the first half of a step, and run it by the first other executor that supports it.

        works: the step's requests and tokens. ticket: what `supports` returned. Returns: the result of the
            forward pass, whose second half (`sample`) is broadcast as well.
        """
        requests = [bare(request) for request in self.runner.rows.fresh.values()]
        changes = self.cache.collect(works)
        stained = self.runner.attention.pool.stained
        own = [with_rows(work) for work in works]
        self.workers.broadcast(ForwardMessage(own, ticket, requests, changes, stained))
        self.cache.apply(changes)
        step = run_by_first(self.others, works, ticket, self.runner.eager)
        return replace(step, rest=partial(self.sample, step))

    def sample(self, step: Forwarded, allowed: TokenBitmask | None) -> Pending:
        """Broadcast that a step is sampled and whether with masks; sample it and return its pending tokens.

        step: result of the forward pass. allowed: bit masks of the grammars' tokens; None: no sample has one.
        """
        self.workers.broadcast(SampleMessage(masked=allowed is not None))
        return self.runner.sample(step, allowed)


class StepWorker:
    """Runs, on every other rank, the halves of steps (forward pass, sampling) that rank 0 broadcasts."""

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
        """Run the forward pass of a step, after storing its new requests and the cache's changes from
        `message`.
        """
        rows = self.runner.rows
        for request in message.requests:
            rows.fresh[request.row] = request
            rows.prompt_lens[request.row] = request.prompt_len
        self.cache.apply(message.changes)
        self.runner.attention.pool.stained = message.stained
        self._step = self.runner.forward(message.works, masked=message.masked)

    def sample(self, message: SampleMessage) -> None:
        """Sample the step whose forward pass has run. Rank 0 alone has masks; where it has any, its tokens
        count.
        """
        self.runner.sample(self._step, self._no_masks if message.masked else None)


def bare(request: Request) -> Request:
    """Return a copy of a request that has all that a runner reads, but no grammar, which may be large."""
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

    make: makes the runner, given `model` to `cache` and `options`, its keywords. workers: the other ranks,
        on rank 0; None on all others.
    """
    seen = StepCache(cache)
    runner = make(model, attention, rows, seen, **options)
    if workers is not None:
        runner.ask_first(BroadcastExecutor(runner, seen, workers, runner.executors))
    return runner
