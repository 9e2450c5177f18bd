"""One graph for a whole step of speculation: verify, keep what agrees, draft anew behind it.

Which tokens were right is known on the device before the host hears of it. So nothing here asks the host: a
request's position lies in `next_at`, its drafts lie behind its newest token in its row, and a replay reads
both and leaves them for the next one. Lengths are padded: the drafter catches up with all places that were
verified, and what it computes behind a wrong draft is written over when the right tokens come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.sampling.sampler import Feature, Plan
from cuda_graphs.capture import Capturer, Replay
from cuda_graphs.decode_graph import DecodeGraph, Machine, narrow_logits
from cuda_graphs.step_kernels import gather_inputs
from paged_cache.attention import PagedBatch
from speculative.ahead.kernels import accept, find_places, hand_on
from speculative.head import Head
from triton_paged_attention.batch import fixed_batch


@dataclass(frozen=True)
class Pair:
    """The model and who drafts for it; all of it stays where it is as long as the engine lives.

    next_at: `[R]` int64, the position of the newest token of each row of the model.
    states: `[T, 3 * hidden]` of the newest step, for a head: what its taps kept, and the last hidden states.
    """

    large: Machine
    small: Machine
    next_at: Tensor
    states: Callable[[Tensor], Tensor] | None = None


class Uncaptured(Capturer):
    """For a graph that is part of another: the function itself."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def capture(self, function: Callable[[], None]) -> Replay:
        """Nothing is recorded, and nothing runs."""
        return function


class AheadGraph:
    """A step of `size` requests with `drafts` drafts each.

    Args:
        given: `[4, size]` int64, see `kernels`; filled before each replay, padded with rows of -1.
        kind: how it samples, one of `decode_graph.CAPTURED`.

    told: `[size, 2 * drafts + 2]` int64, see `kernels.accept`; good until the next replay.
    """

    told: Tensor

    def __init__(
        self, pair: Pair, size: int, drafts: int, given: Tensor, kind: Feature, capturer: Capturer
    ) -> None:
        self.pair, self.size, self.drafts, self.given = pair, size, drafts, given
        self.plan = Plan(kind, (), None).for_any_rows()
        device, places = given.device, size * (drafts + 1)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.batch, self.small_batch = (several(size, drafts + 1, device) for _ in range(2))
        self.at, self.rows, self.picked, self.draft_steps, self.small_rows = (ints(size) for _ in range(5))
        self.token_rows, self.token_at, self.steps = (ints(places) for _ in range(3))
        self.small_token_rows, self.small_at, self.unread = (ints(places) for _ in range(3))
        chain = ints(3, size)
        self.chain = DecodeGraph(pair.small, size, chain, kind, Uncaptured())
        self.chained = chain
        given[0], given[1:] = -1, 0  # all padding, which harms nobody
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """The step; what is captured."""
        pair = self.pair
        find_places(
            self.given,
            pair.next_at,
            at=self.at,
            rows=self.rows,
            token_rows=self.token_rows,
            token_at=self.token_at,
            steps=self.steps,
            contexts=self.batch.context_lens,
            small_rows=self.small_rows,
            small_token_rows=self.small_token_rows,
            small_at=self.small_at,
            small_contexts=self.small_batch.context_lens,
            drafts=self.drafts,
        )
        hidden = self._forward(
            pair.large, self.batch, self.rows, self.token_rows, self.token_at, ids=self.batch.input_ids
        )
        sampled = self._sample(pair.large, hidden, self.token_rows, self.steps)
        # Made anew: where nothing is captured, the host reads it after the next step has run.
        self.told = self.at.new_empty(self.size, 2 * self.drafts + 2)
        accept(
            sampled,
            self.batch.input_ids,
            at=self.at,
            rows=self.rows,
            given=self.given,
            tokens=pair.large.rows.tokens,
            next_at=pair.next_at,
            told=self.told,
            picked=self.picked,
            draft_steps=self.draft_steps,
            drafts=self.drafts,
        )
        self._draft(hidden, sampled)

    def _draft(self, hidden: Tensor, sampled: Tensor) -> None:
        """The drafter catches up with what was sampled, and writes ahead from the last right place."""
        small = self.pair.small
        head = small.model if isinstance(small.model, Head) else None
        if head is not None:
            assert self.pair.states is not None
            head.feed(head.mix(self.pair.states(hidden)))
        self.small_batch.input_ids.copy_(sampled)
        out = self._forward(
            small, self.small_batch, self.small_rows, self.small_token_rows, self.small_at, ids=self.unread
        )
        last = out[self.picked]  # [size, hidden]
        self._hand_on(self._sample(small, last, self.small_rows, self.draft_steps), 0)
        for number in range(1, self.drafts):
            if head is not None:
                head.feed(last)
            self.chain.compute()
            last = self.chain.hidden
            self._hand_on(self.chain.tokens, number)

    def _hand_on(self, made: Tensor, number: int) -> None:
        hand_on(
            made,
            number,
            at=self.at,
            rows=self.rows,
            given=self.given,
            tokens=self.pair.large.rows.tokens,
            next_at=self.pair.next_at,
            told=self.told,
            small_tokens=self.pair.small.rows.tokens,
            chain=self.chained,
            drafts=self.drafts,
        )

    def _forward(
        self, on: Machine, batch: PagedBatch, rows: Tensor, token_rows: Tensor, at: Tensor, *, ids: Tensor
    ) -> Tensor:
        """Hidden states of the tokens `batch.input_ids` in these places: `[places, hidden]`."""
        gather_inputs(
            token_rows,
            at,
            on.rows.tokens,
            on.tables.data,
            on.block_size,
            ids=ids,
            positions=batch.positions,
            slots=batch.slots,
        )
        on.attention.begin(replace(batch, block_tables=on.tables.data[rows]))
        hidden: Tensor = on.model(batch.input_ids, batch.positions, on.attention)
        return hidden

    def _sample(self, on: Machine, hidden: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        return on.sampler.sample(narrow_logits(on.model, hidden), rows, (), steps, self.plan).tokens


def several(size: int, each: int, device: torch.device) -> PagedBatch:
    """A fixed batch of `size` requests with `each` tokens each."""
    batch = fixed_batch(size * each, 1, device)
    host = replace(
        batch.host,
        rows=np.arange(size),
        query_lens=np.full(size, each),
        query_starts=np.arange(size + 1) * each,
        context_lens=np.full(size, each),  # nobody may read the real ones
    )
    starts = torch.arange(size + 1, dtype=torch.int32, device=device) * each
    contexts = torch.zeros(size, dtype=torch.int32, device=device)
    return replace(batch, host=host, query_starts=starts, context_lens=contexts)
