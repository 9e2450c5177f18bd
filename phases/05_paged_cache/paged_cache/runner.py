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
    """Return the hidden states of a step's works, by the first executor that supports it, or by `eager`.

    masked: True if its samples get bit masks.
    """
    for executor in executors:
        if (ticket := executor.supports(works, masked)) is not None:
            return executor.run(works, ticket)
    return eager(works)


class PagedRunner(Runner):
    """Runs steps over a paged KV cache.

    Args:
        model: computes hidden states and logits.
        attention: any backend over the pool.
        rows: where the tokens are.
        cache: whose tables say where keys and values are.
        executors: factories of executors, called with this runner in the order of asking; None is left out.
        options: those of `continuous.Runner`.

    executors: asked for each step in this order; `eager` runs what none supports.
    last: the first half of the newest step; its hidden states are valid until the next step.
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
        """Compute a step's hidden states (see `Runner.forward`) by the first executor that supports it."""
        self.last = run_by_first(self.executors, works, masked, self.eager)
        return self.last

    def eager(self, works: Sequence[Work]) -> Forwarded:
        """Run the first half of a step's works, one operation after the other; return its hidden states."""
        return super().forward(works)

    def release(self) -> None:
        """Destroy the executors' CUDA graphs after the last step; this class has no executors with graphs."""

    def refresh(self, works: Sequence[Work]) -> None:
        """Upload new requests, copy blocks, and zero those that may hold NaN, before a step (`works`)."""
        super().refresh(works)
        if (moves := self.cache.take_moves(works)) is not None:
            self.attention.pool.regroup(moves)
        if (fresh := self.cache.take_fresh()) and self.attention.pool.stained:
            self.attention.pool.wipe(fresh)
        if copies := self.cache.take_copies():
            self.attention.pool.copy(copies)

    def prepare(self, works: Sequence[Work]) -> Batch:
        """Return the inputs on the device of a step of these works, with block tables and slots."""
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
