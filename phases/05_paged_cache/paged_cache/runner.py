"""The runner over a paged cache: block tables and slots in the batch, and block copies before the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from continuous.batch import Batch, HostBatch, Ints
from continuous.rows import RequestRows
from continuous.runner import Forwarded, Runner
from continuous.work import Work
from forward.model import Model
from paged_cache.attention import PagedAttention, PagedBatch
from paged_cache.cache import PagedCache
from paged_cache.executor import StepExecutor


def run_by_first(
    executors: Sequence[StepExecutor],
    works: Sequence[Work],
    masked: bool,
    eager: Callable[[Sequence[Work]], Forwarded],
) -> Forwarded:
    """Run a step's forward pass by the first executor that supports the step, else by `eager`.

    works: the step's requests and tokens. masked: True if its samples get bit masks of allowed tokens.
    Returns its hidden states, not sampled yet.
    """
    for executor in executors:
        if (ticket := executor.supports(works, masked)) is not None:
            return executor.run(works, ticket)
    return eager(works)


class PagedRunner(Runner):
    """Runs steps over a paged KV cache.

    Args:
        model: computes hidden states and logits.
        attention: a backend over the block pool.
        rows: the running requests' token ids on the device.
        cache: the block tables.
        executors: functions from this runner to an executor (a faster way to run certain steps), in the
            order in which these are asked; if one returns None, there is no such executor.
        options: further arguments of `continuous.Runner`.

    executors: the executors, asked for each step in this order; `eager` runs a step that none supports.
    last: the newest step's forward pass; its hidden states are valid until the next step.
    """

    attention: PagedAttention
    executors: Sequence[StepExecutor] = ()
    last: Forwarded | None = None

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        rows: RequestRows,
        cache: PagedCache,
        *,
        executors: Sequence[Callable[..., StepExecutor | None]] = (),
        **options: Any,
    ) -> None:
        super().__init__(model, attention, rows, **options)
        self.cache = cache
        self._make_executors(executors)

    def _make_executors(self, factories: Sequence[Callable[..., StepExecutor | None]]) -> None:
        for make in reversed(factories):
            if (executor := make(self)) is not None:
                self.ask_first(executor)

    def ask_first(self, executor: StepExecutor) -> None:
        """Add an executor (a faster way to run certain steps), which is asked before the others."""
        self.executors = [executor, *self.executors]

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """Run a step's forward pass by the first executor that supports it; return its hidden states.

        works: the step's requests and tokens. masked: True if its sampling will be masked.
        """
        self.last = run_by_first(self.executors, works, masked, self.eager)
        return self.last

    def eager(self, works: Sequence[Work]) -> Forwarded:
        """Run a step's forward pass one operation after the other; return its hidden states, not sampled yet.

        works: the step's requests and tokens.
        """
        return super().forward(works)

    def release(self) -> None:
        """Destroy the executors' CUDA graphs after the last step; this class has no executors with graphs."""

    def refresh(self, works: Sequence[Work]) -> None:
        """Update the device before a step: upload new requests' tokens, set blocks to zero, copy blocks.

        works: the step's requests and tokens. Blocks that a request has just taken are set to zero if some
        block may hold NaN; blocks that two requests shared are copied before one of them writes.
        """
        super().refresh(works)
        if (moves := self.cache.take_moves(works)) is not None:
            self.attention.pool.regroup(moves)
        if (fresh := self.cache.take_fresh()) and self.attention.pool.stained:
            self.attention.pool.wipe(fresh)
        if copies := self.cache.take_copies():
            self.attention.pool.copy(copies)

    def prepare(self, works: Sequence[Work]) -> Batch:
        """Return a step's inputs on the device, with block tables and slots.

        works: the step's requests and tokens, in batch order.
        """
        host = HostBatch.of(works, self.rows.prompt_lens)
        return PagedBatch.of(
            host, self.rows, block_tables=self.block_tables(host), slots=self.slots(host)
        )

    def block_tables(self, host: HostBatch) -> NDArray[np.int32]:
        """Return a batch's block tables on the host: `[B, most]`, `most` blocks in its longest context."""
        width = self.cache.blocks_for(int(host.context_lens.max()))
        return self.cache.tables[host.rows, :width]

    def slots(self, host: HostBatch) -> Ints:
        """Return where each new token's key and value go, `[T]` int64 on the host: `block * P + offset`."""
        size = self.cache.block_size
        blocks = self.cache.tables[host.token_rows, host.positions // size]
        return blocks.astype(np.int64) * size + host.positions % size
