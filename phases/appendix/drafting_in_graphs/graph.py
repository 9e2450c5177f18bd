"""One CUDA graph for a whole speculative step: verify drafts, accept those that agree, draft anew.

The device knows which drafts are accepted before the host does. So nothing here asks the host: a request's
position lies in `next_at`, its drafts lie behind its newest token in its row, and a replay reads both and
leaves them for the next one. Lengths are padded: a head computes all positions that were verified, and what
it computes behind a rejected draft is written over when the right tokens come.

A draft is hardly any work, and its kernels wait for each other: two or three microseconds each, whatever
they do. So a head's step is its layer, which phase 09 made five kernels of, and as little else as can be:
the layer's input takes two kernels instead of six, drafts are chosen among the tokens that the head knows,
not among all, and the positions and angles of all drafts are computed before the first.
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
from phases.appendix.drafting_in_graphs.kernels import (
    Chain,
    Step,
    StepPositions,
    normalize_and_concatenate,
)
from phases.appendix.latency.layers import add_kernel
from speculative.head import Head, ReducedHead
from triton_paged_attention.linear import FusedLinear


class HeadDrafts:
    """A draft head as the graph calls it.

    on: the head's model, tables, attention and sampler.
    kept: `[T, hooks * h]`, the hidden states that the head reads, from between the large model's layers.
    plan: how all drafts are sampled.
    names: `[N]` int64, the token ids of what `choose` returns; None: it returns token ids.
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
            _small_batch_projection(weight)
            for weight in (head.mix_states.weight, head.fuse.weight, head.lm_head.weight)
        )
        self._state_norms = _stack_weights(
            *head.state_norms, head.norm
        )  # the last is not used
        self._input_norms = _stack_weights(head.token_norm, head.feature_norm)
        if plan.features == SamplingFlags(
            0
        ):  # noise belongs to token ids, the largest logit to none
            self.names = head.lm_head.ids

    def catch_up(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Compute the head's hidden states `[T, h]` at the positions that were verified.

        ids: `[T]` int64, the tokens sampled there. hidden: `[T, h]`, the large model's last hidden states.
        """
        states = normalize_and_concatenate(
            self.kept, hidden, self._state_norms, self.head.config.norm_eps
        )
        return self.step(ids, self._mix(states), self.head.rope(positions), attention)

    def choose(self, last: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        """Choose one draft for each request, `[B]` int64: an index into `names`, or a token id if `names` is
        None.

        last: `[B, h]`, hidden states. rows, steps: `[B]` int64, for the sampler.
        """
        logits = narrow_logits(self.head, last) if self.names is None else self._logits(last)
        return self.on.sampler.sample(logits, rows, (), steps, self.plan).tokens

    def step(
        self,
        ids: Tensor,
        features: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        """Run the head on tokens `ids [T]` and the hidden states before them, `features [T, h]`: `[T, h]`."""
        table, eps = self.head.embed_tokens.weight, self.head.config.norm_eps
        given = normalize_and_concatenate(
            table, features, self._input_norms, eps, ids=ids, norm_last=True
        )
        return self.head.through(self._fuse(given), cos_sin, attention)


def _small_batch_projection(weight: Tensor) -> FusedLinear:
    """Return a projection that shares `weight`, with kernels for one token and for two to eight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    fused = FusedLinear(linear)
    add_kernel(fused)
    return by_columns(fused, fewest=1)


def _stack_weights(*norms: nn.Module) -> Tensor:
    """Return the norms' weights as one tensor `[len(norms), h]`."""
    return torch.stack([norm.get_parameter("weight") for norm in norms])


@dataclass(frozen=True)
class Pair:
    """The large model and the draft head in a graph; none of these tensors may move while the engine lives.

    large: the model that verifies.
    small: the draft head; None: n-grams are looked up in the text.
    next_at: `[R]` int64, the position of the newest token of each row of the large model.
    kept: `[T, hooks * h]`, hidden states from between the large model's layers; None without a head.
    """

    large: GraphContext
    small: GraphContext | None
    next_at: Tensor
    kept: Tensor | None = None


class DraftingGraph:
    """The captured step of `size` requests with `drafts` drafts each.

    Args:
        pair: the models.
        given: `[4, size]` int64, see `kernels`; written before each replay, padded with rows of -1.
        kind: how it samples, one of `decode_graph.CAPTURED`.
        capturer: captures `compute`.

    Attributes:
        host_output: `[size, 2 * drafts + 2]` int64: the number of accepted drafts, the `drafts + 1` sampled
            tokens, and the next drafts; valid until the next replay.
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
        device, tokens = given.device, size * (drafts + 1)

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.batch, self.small_batch = (
            fixed_batch(size, 1, device, drafts + 1) for _ in range(2)
        )
        here, there = ([ints(size), ints(tokens), ints(tokens)] for _ in range(2))
        lens, small_lens = self.batch.context_lens, self.small_batch.context_lens
        self.positions = StepPositions._make(
            [ints(size), *here, ints(tokens), lens, *there, small_lens]
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
        """Queue the kernels of one step, which the constructor captures."""
        pair = self.pair
        large = pair.large
        batch = self.batch
        positions = self.positions
        # Made anew: where nothing is captured, the host reads it after the next step has run.
        self.host_output = self.newest.new_empty(self.size, 2 * self.drafts + 2)
        step = Step(
            self.given,
            large.rows.tokens,
            pair.next_at,
            self.host_output,
            positions,
            self.later,
            self.drafts,
        )
        step.find_positions()
        large.gather(positions.token_rows, positions.token_at, batch)
        large.attention.begin(replace(batch, block_tables=large.tables.data[positions.rows]))
        hidden = large.model(
            batch.input_ids, batch.positions, large.attention
        )  # [tokens, hidden]
        logits = narrow_logits(large.model, hidden)
        chosen = large.sampler.sample(
            logits, positions.token_rows, (), positions.steps, self.plan
        )
        step.accept(chosen.tokens, batch.input_ids)
        self.host_output[:, 1 : self.drafts + 2] = chosen.for_host.view(self.size, -1)
        if self.drafter is None:
            step.look_up()
        else:
            self._draft(step, self.drafter, hidden, chosen.tokens)

    def _draft(self, step: Step, drafter: HeadDrafts, hidden: Tensor, sampled: Tensor) -> None:
        """Run the head over the verified positions, then one position at a time, and write each draft.

        hidden: `[T, h]`, the large model's. sampled: `[T]` int64, its tokens.
        """
        small = drafter.on
        batch = self.small_batch
        positions = self.positions
        later = self.later
        tables = small.tables.data[positions.small_rows]
        small.gather(positions.small_token_rows, positions.small_at, batch)
        small.attention.begin(replace(batch, block_tables=tables))
        out = drafter.catch_up(sampled, hidden, batch.positions, small.attention)
        last = out[later.picked]  # [size, hidden]
        self._choose_drafts(step, drafter, last, 0)
        if not self.chain:
            return
        small.gather(later.rows, later.at, self.drafted)
        cos, sin = (
            x.unflatten(0, (-1, self.size)) for x in drafter.head.rope(self.drafted.positions)
        )
        for number, decodes in enumerate(self.chain):
            small.attention.begin(replace(decodes, block_tables=tables))
            last = drafter.step(self.newest, last, (cos[number], sin[number]), small.attention)
            self._choose_drafts(step, drafter, last, number + 1)

    def _choose_drafts(
        self, step: Step, drafter: HeadDrafts, last: Tensor, number: int
    ) -> None:
        made = drafter.choose(last, self.positions.small_rows, self.later.draft_steps[number])
        step.write_drafts(made, number, drafter.names, drafter.on.rows.tokens, self.newest)
