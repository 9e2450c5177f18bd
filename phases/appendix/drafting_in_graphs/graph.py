"""One graph for a whole step of speculation: verify, keep what agrees, draft anew behind it.

Which tokens were right is known on the device before the host hears of it. So nothing here asks the host: a
request's position lies in `next_at`, its drafts lie behind its newest token in its row, and a replay reads
both and leaves them for the next one. Lengths are padded: a model that drafts catches up with all places that
were verified, and what it computes behind a wrong draft is written over when the right tokens come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.sampling.sampler import Needs, Plan
from cuda_graphs.batch import fixed_batch
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import GraphContext, narrow_logits
from cuda_graphs.step_kernels import gather_inputs
from paged_cache.attention import PagedBatch
from phases.appendix.drafting_in_graphs.drafts import HeadDrafts, ModelDrafts
from phases.appendix.drafting_in_graphs.kernels import accept, find_places, hand_on
from phases.appendix.drafting_in_graphs.lookup import look_up
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.prefill import query_tiles


@dataclass(frozen=True)
class Pair:
    """The model and who drafts for it; all of it stays where it is as long as the engine lives.

    small: None: n-grams are looked up in the text.
    next_at: `[R]` int64, the position of the newest token of each row of the model.
    kept: `[T, taps * hidden]`, hidden states between the layers in the newest step, for a head.
    """

    large: GraphContext
    small: GraphContext | None
    next_at: Tensor
    kept: Tensor | None = None


class AheadGraph:
    """A step of `size` requests with `drafts` drafts each.

    Args:
        given: `[4, size]` int64, see `kernels`; filled before each replay, padded with rows of -1.
        kind: how it samples, one of `decode_graph.CAPTURED`.

    told: `[size, 2 * drafts + 2]` int64, see `kernels.accept`; good until the next replay.
    """

    told: Tensor

    def __init__(
        self, pair: Pair, size: int, drafts: int, given: Tensor, kind: Needs, capturer: Capturer
    ) -> None:
        self.pair, self.size, self.drafts, self.given = pair, size, drafts, given
        self.plan = Plan(kind, (), None).for_any_rows()
        device, places = given.device, size * (drafts + 1)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.batch, self.small_batch = (several(size, drafts + 1, device) for _ in range(2))
        self.at, self.rows, self.picked, self.newest, self.small_rows = (ints(size) for _ in range(5))
        self.token_rows, self.token_at, self.steps = (ints(places) for _ in range(3))
        self.small_token_rows, self.small_at, self.unread = (ints(places) for _ in range(3))
        self.draft_steps = ints(drafts, size)
        self.chain_rows, self.chain_at, self.chain_positions, self.chain_slots, self.chain_unread = (
            ints((drafts - 1) * size) for _ in range(5)
        )
        self.chain_contexts = torch.zeros(drafts - 1, size, dtype=torch.int32, device=device)
        chain = fixed_batch(size, 1, device)
        self.chain = [
            replace(chain, context_lens=contexts, slots=slots)
            for contexts, slots in zip(self.chain_contexts, self.chain_slots.view(-1, size), strict=True)
        ]
        self.verified = Beginning(pair.large.attention, size, drafts + 1, device)
        self.drafter = drafter_of(pair, self.plan)
        if self.drafter is not None:
            self.caught_up = Beginning(self.drafter.on.attention, size, drafts + 1, device)
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
        large, batch = pair.large, self.batch
        self._find(large, self.token_rows, self.token_at, batch.input_ids, batch.positions, batch.slots)
        self.verified.begin(replace(batch, block_tables=large.tables.data[self.rows]))
        hidden = large.model(batch.input_ids, batch.positions, large.attention)  # [places, hidden]
        logits = narrow_logits(large.model, hidden)
        chosen = large.sampler.sample(logits, self.token_rows, (), self.steps, self.plan)
        sampled = chosen.tokens
        # Made anew: where nothing is captured, the host reads it after the next step has run.
        self.told = self.at.new_empty(self.size, 2 * self.drafts + 2)
        accept(
            sampled,
            batch.input_ids,
            at=self.at,
            rows=self.rows,
            given=self.given,
            tokens=large.rows.tokens,
            next_at=pair.next_at,
            told=self.told,
            picked=self.picked,
            draft_steps=self.draft_steps,
            chain_rows=self.chain_rows,
            chain_at=self.chain_at,
            chain_contexts=self.chain_contexts,
            drafts=self.drafts,
        )
        self.told[:, 1 : self.drafts + 2] = chosen.for_host.view(self.size, -1)
        if self.drafter is None:
            look_up(self.at, self.rows, large.rows.tokens, pair.next_at, self.told, self.drafts)
        else:
            self._draft(self.drafter, hidden, sampled)

    def _draft(self, drafter: ModelDrafts, hidden: Tensor, sampled: Tensor) -> None:
        """The drafter catches up with what was sampled, and writes ahead from the last right place."""
        small, batch = drafter.on, self.small_batch
        tables = small.tables.data[self.small_rows]
        self._find(small, self.small_token_rows, self.small_at, self.unread, batch.positions, batch.slots)
        self.caught_up.begin(replace(batch, block_tables=tables))
        out = drafter.catch_up(sampled, hidden, batch.positions, small.attention)
        last = out[self.picked]  # [size, hidden]
        self._hand_on(drafter, last, 0)
        if not self.chain:
            return
        positions = self.chain_positions
        self._find(small, self.chain_rows, self.chain_at, self.chain_unread, positions, self.chain_slots)
        drafter.go_on(positions.view(-1, self.size))
        for number, decodes in enumerate(self.chain):
            small.attention.begin(replace(decodes, block_tables=tables))
            last = drafter.step(number, self.newest, last, small.attention)
            self._hand_on(drafter, last, number + 1)

    def _hand_on(self, drafter: ModelDrafts, last: Tensor, number: int) -> None:
        hand_on(
            drafter.choose(last, self.small_rows, self.draft_steps[number], self.plan),
            number,
            names=drafter.names,
            at=self.at,
            rows=self.rows,
            given=self.given,
            tokens=self.pair.large.rows.tokens,
            next_at=self.pair.next_at,
            told=self.told,
            small_tokens=drafter.on.rows.tokens,
            newest=self.newest,
            drafts=self.drafts,
        )

    @staticmethod
    def _find(
        on: GraphContext, rows: Tensor, at: Tensor, ids: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        """Find which tokens stand in these places, and where their keys go."""
        gather_inputs(
            rows, at, on.rows.tokens, on.tables.data, on.block_size, ids=ids, positions=positions, slots=slots
        )


class Beginning:
    """Begins steps of `size` requests with `each` tokens each.

    The decode kernel takes a few tokens of a request. What has more is cut into tiles, always the same ones
    but for the positions they begin at.
    """

    def __init__(self, attention: TritonPagedAttention, size: int, each: int, device: torch.device) -> None:
        self.attention = attention
        self._tiles: Tensor | None = None
        if each > attention.most_queries:
            lens = np.full(size, each)
            self._tiles = torch.from_numpy(query_tiles(lens, lens, attention.tile_tokens)).to(device)
            self._first = self._tiles[:, 1].long()

    def begin(self, batch: PagedBatch) -> None:
        """`attention.begin`; nothing is sent to the device, so that it can be captured."""
        if self._tiles is None:
            self.attention.begin(batch)
        else:
            self._tiles[:, 3] = batch.positions[self._first]
            self.attention.begin_sorted(batch, None, self._tiles)


def drafter_of(pair: Pair, plan: Plan) -> ModelDrafts | None:
    """The model that drafts, whose drafts are sampled by this plan."""
    if pair.small is None:
        return None
    return ModelDrafts(pair.small) if pair.kept is None else HeadDrafts(pair.small, pair.kept, plan)


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
