"""A step on several ranks: rank 0 schedules it and broadcasts it, and the other ranks compute it as well.

A step is broadcast in two halves, forward pass and sampling. Only rank 0 has a scheduler, drafts and
grammars. Besides the step's tokens, a rank's runner needs only what its device does not know yet: requests
that are new in their rows of the block tables, and changes of the cache.
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
from paged_cache.runner import run_by_first
from parallel.messages import CacheChanges, ForwardMessage, SampleMessage, with_rows
from parallel.worker_group import WorkerGroup


class StepCache:
    """A rank's runner's view of the cache: block tables, and blocks to wipe or copy before the next step.

    Rank 0 collects the changes from the scheduler's cache and broadcasts them. All ranks apply them here, and
    each rank's runner takes them once.

    tables: `[rows, most blocks of a request]` int32, block numbers. block_size: tokens of a block.
    blocks_for: function from a number of tokens to the number of blocks that hold them.
    moves, fresh, copies: what the methods `take_moves`, `take_fresh` and `take_copies` return next.
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
        """Return the changes that all ranks must apply before a step; they are taken from rank 0's cache.

        works: the step's requests and tokens. Of the block tables, only those entries are returned that the
            step reads and that differ from what earlier calls have returned.
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
        """Return the changes of a hybrid cache's page tables since the last step, as rank 0 sent them.

        None: no changes. A hybrid cache (phase 17) is for models whose layers differ: a page, a number in its
            block tables, can get other blocks. Other caches never have changes. works: not used.
        """
        moves, self.moves = self.moves, None
        return moves

    def take_fresh(self) -> list[int]:
        """Return the numbers of blocks that have got a new owner since the last step, as rank 0 sent them.

        A block's owner is the request that writes it.
        """
        fresh, self.fresh = self.fresh, []
        return fresh

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the blocks to copy before the next step, pairs (source, target), as rank 0 sent them."""
        copies, self.copies = self.copies, []
        return copies


class BroadcastExecutor:
    """Rank 0's first step executor: broadcasts a step to the other ranks, then has it run by other executors.

    An executor computes the steps that it supports, such as by a CUDA graph. Forward pass and sampling are
    broadcast one by one.
    """

    order: ClassVar[int] = 0

    def __init__(self, runner: PagedRunner, cache: StepCache, workers: WorkerGroup) -> None:
        self.runner = runner
        self.cache = cache
        self.workers = workers
        self.others = runner.executors

    def supports(self, works: Sequence[Work], masked: bool) -> bool:
        """Return `masked`, the value for `run`: this executor runs every step.

        It never returns None, by which an executor leaves a step to the next one.

        works: the step's requests and tokens. masked: whether grammars may mask its samples.
        """
        return masked

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Broadcast a step's forward pass, and run it by the first other executor that supports it.

        works: the step's requests and tokens. ticket: whether grammars may mask its samples.

        Returns:
            The result of the forward pass. Its `rest`, which samples the step later, is `self.sample`, so
            that the sampling is broadcast, too.
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
        """Broadcast that a step is sampled now; sample it, and return its tokens.

        The device may still be computing the tokens.

        step: result of the forward pass. allowed: bit masks of the tokens that grammars allow; None: no
            masks.
        """
        self.workers.broadcast(SampleMessage(masked=allowed is not None))
        return self.runner.sample(step, allowed)


class StepWorker:
    """Runs, on each rank but rank 0, the forward passes and samplings that rank 0 broadcasts."""

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
        """Apply the new requests and the cache's changes in `message`, then run its step's forward pass."""
        rows = self.runner.rows
        for request in message.requests:
            rows.fresh[request.row] = request
            rows.prompt_lens[request.row] = request.prompt_len
        self.cache.apply(message.changes)
        self.runner.attention.pool.stained = message.stained
        self._step = self.runner.forward(message.works, masked=message.masked)

    def sample(self, message: SampleMessage) -> None:
        """Sample the step whose forward pass has run last.

        If `message.masked`, rank 0 has grammar masks for the step; this rank has none, and takes the tokens
        that rank 0 samples.
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
    """Return a rank's runner, which computes steps; on rank 0 it also broadcasts them to the other ranks.

    make: called as `make(model, attention, rows, seen, **options)`, returns a runner. `seen` is a new
        `StepCache` of `cache`: block tables with the changes that rank 0 broadcasts.
    workers: the other ranks' processes, on rank 0; None on all others.
    """
    seen = StepCache(cache)
    runner = make(model, attention, rows, seen, **options)
    if workers is not None:
        runner.ask_first(BroadcastExecutor(runner, seen, workers))
    return runner
