"""One graph for a whole step of speculation: verify, keep what agrees, draft anew behind it.

Which tokens were right is known on the device before the host hears of it. So nothing here asks the host: a
request's position lies in `next_at`, its drafts lie behind its newest token in its row, and a replay reads
both and leaves them for the next one. Lengths are padded: a head catches up with all places that were
verified, and what it computes behind a wrong draft is written over when the right tokens come.

A draft is hardly any work, and its kernels wait for each other: two or three microseconds each, whatever it
does. So a head's step is its layer, which phase 09 made five kernels of, and as little else as can be: what
the layer is given takes two kernels instead of six, drafts are chosen among the tokens that the head knows,
not among all, and where all of them will stand, and their angles, is worked out before the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from common.sampling.sampler import SamplingFlags, SamplingMetadata
from cuda_graphs.batch import fixed_batch
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import GraphContext, narrow_logits
from forward.attention import Attention
from phases.appendix.drafting_in_graphs.columns import by_columns
from phases.appendix.drafting_in_graphs.kernels import Chain, Step, StepPositions, side_by_side
from phases.appendix.latency.layers import add_kernel
from speculative.head import Head, ReducedHead
from triton_paged_attention.linear import FusedLinear


class HeadDrafts:
    """A head, which reads hidden states: `kept [T, taps * h]` between the layers, and the last ones.

    plan: how all drafts are sampled.
    names: `[N]`, the token ids of what `choose` returns; None: it returns token ids.
    """

    names: Tensor | None = None

    def __init__(self, on: GraphContext, kept: Tensor, plan: SamplingMetadata) -> None:
        head = on.model
        assert isinstance(head, Head) and isinstance(head.lm_head, ReducedHead)
        self.on = on
        self.head = head
        self.kept = kept
        self.plan = plan
        self._mix, self._fuse, self._logits = (
            _quick(weight)
            for weight in (head.mix_states.weight, head.fuse.weight, head.lm_head.weight)
        )
        self._state_norms = _stacked(*head.state_norms, head.norm)  # the last is not used
        self._input_norms = _stacked(head.token_norm, head.feature_norm)
        if plan.features == SamplingFlags(
            0
        ):  # noise belongs to token ids, the largest logit to none
            self.names = head.lm_head.ids

    def catch_up(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Compute the places that were verified, of which `hidden` is what the large model made: `[T, h]`."""
        states = side_by_side(self.kept, hidden, self._state_norms, self.head.config.norm_eps)
        return self.step(ids, self._mix(states), self.head.rope(positions), attention)

    def choose(self, last: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        """One draft of each request, `[B]` int64: its place in `names` where there are any."""
        logits = narrow_logits(self.head, last) if self.names is None else self._logits(last)
        return self.on.sampler.sample(logits, rows, (), steps, self.plan).tokens

    def step(
        self,
        ids: Tensor,
        features: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        """`Head.step`; behind drafts, `features [B, h]` are what came of the step before."""
        table, eps = self.head.embed_tokens.weight, self.head.config.norm_eps
        given = side_by_side(table, features, self._input_norms, eps, ids=ids, norm_last=True)
        return self.head.through(self._fuse(given), cos_sin, attention)


def _quick(weight: Tensor) -> FusedLinear:
    """A projection with kernels for one token and for a few; the weight is shared."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    fused = FusedLinear(linear)
    add_kernel(fused)
    return by_columns(fused, fewest=1)


def _stacked(*norms: nn.Module) -> Tensor:
    """The norms' weights, `[len(norms), h]`."""
    return torch.stack([norm.get_parameter("weight") for norm in norms])


@dataclass(frozen=True)
class Pair:
    """The model and what drafts for it; all of it stays where it is as long as the engine lives.

    small: a head; None: n-grams are looked up in the text.
    next_at: `[R]` int64, the position of the newest token of each row of the model.
    kept: `[T, taps * hidden]`, hidden states between the layers in the newest step, for a head.
    """

    large: GraphContext
    small: GraphContext | None
    next_at: Tensor
    kept: Tensor | None = None


class DraftingGraph:
    """A step of `size` requests with `drafts` drafts each.

    Args:
        given: `[4, size]` int64, see `kernels`; filled before each replay, padded with rows of -1.
        kind: how it samples, one of `decode_graph.CAPTURED`.

    told: `[size, 2 * drafts + 2]` int64, see `kernels.accept`; good until the next replay.
    """

    host_output: Tensor

    def __init__(
        self,
        pair: Pair,
        size: int,
        drafts: int,
        given: Tensor,
        kind: SamplingFlags,
        capturer: Capturer,
    ) -> None:
        self.pair = pair
        self.size = size
        self.drafts = drafts
        self.given = given
        self.plan = SamplingMetadata(kind, (), None).for_any_rows()
        device, places = given.device, size * (drafts + 1)

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.batch, self.small_batch = (
            fixed_batch(size, 1, device, drafts + 1) for _ in range(2)
        )
        here, there = ([ints(size), ints(places), ints(places)] for _ in range(2))
        lens, small_lens = self.batch.context_lens, self.small_batch.context_lens
        self.places = StepPositions._make(
            [ints(size), *here, ints(places), lens, *there, small_lens]
        )
        count = (drafts - 1) * size
        contexts = ints(count, dtype=torch.int32)
        self.later = Chain(ints(size), ints(drafts, size), ints(count), ints(count), contexts)
        self.newest, self.drafted = ints(size), fixed_batch(count, 1, device)
        chain = fixed_batch(size, 1, device)
        several_at = zip(
            contexts.view(-1, size), self.drafted.slots.view(-1, size), strict=True
        )
        self.chain = [
            replace(chain, context_lens=own, slots=slots) for own, slots in several_at
        ]
        self.drafter = None
        if pair.small is not None:
            assert pair.kept is not None
            self.drafter = HeadDrafts(pair.small, pair.kept, self.plan)
        given[0], given[1:] = -1, 0  # all padding, which no request reads
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """The step; what is captured."""
        pair = self.pair
        large = pair.large
        batch = self.batch
        places = self.places
        # Made anew: where nothing is captured, the host reads it after the next step has run.
        self.host_output = self.newest.new_empty(self.size, 2 * self.drafts + 2)
        step = Step(
            self.given,
            large.rows.tokens,
            pair.next_at,
            self.host_output,
            places,
            self.later,
            self.drafts,
        )
        step.find_positions()
        large.gather(places.token_rows, places.token_at, batch)
        large.attention.begin(replace(batch, block_tables=large.tables.data[places.rows]))
        hidden = large.model(
            batch.input_ids, batch.positions, large.attention
        )  # [places, hidden]
        logits = narrow_logits(large.model, hidden)
        chosen = large.sampler.sample(logits, places.token_rows, (), places.steps, self.plan)
        step.accept(chosen.tokens, batch.input_ids)
        self.host_output[:, 1 : self.drafts + 2] = chosen.for_host.view(self.size, -1)
        if self.drafter is None:
            step.look_up()
        else:
            self._draft(step, self.drafter, hidden, chosen.tokens)

    def _draft(self, step: Step, drafter: HeadDrafts, hidden: Tensor, sampled: Tensor) -> None:
        """The head catches up with what was sampled, and writes ahead from the last right place."""
        small = drafter.on
        batch = self.small_batch
        places = self.places
        later = self.later
        tables = small.tables.data[places.small_rows]
        small.gather(places.small_token_rows, places.small_at, batch)
        small.attention.begin(replace(batch, block_tables=tables))
        out = drafter.catch_up(sampled, hidden, batch.positions, small.attention)
        last = out[later.picked]  # [size, hidden]
        self._hand_on(step, drafter, last, 0)
        if not self.chain:
            return
        small.gather(later.rows, later.at, self.drafted)
        cos, sin = (
            x.unflatten(0, (-1, self.size)) for x in drafter.head.rope(self.drafted.positions)
        )
        for number, decodes in enumerate(self.chain):
            small.attention.begin(replace(decodes, block_tables=tables))
            last = drafter.step(self.newest, last, (cos[number], sin[number]), small.attention)
            self._hand_on(step, drafter, last, number + 1)

    def _hand_on(self, step: Step, drafter: HeadDrafts, last: Tensor, number: int) -> None:
        made = drafter.choose(last, self.places.small_rows, self.later.draft_steps[number])
        step.hand_on(made, number, drafter.names, drafter.on.rows.tokens, self.newest)
