"""Drafters inside the graph: any model by its own `forward`, and a head in a third of the kernels.

A draft is hardly any work, and its kernels wait for each other: two or three microseconds each, whatever
it does. So a head's step is its layer, which phase 09 made five kernels of, and as little else as can be:
what the layer is given takes two kernels instead of six, drafts are chosen among the tokens that the head
knows, not among all, and where all of them will stand, and their angles, is worked out before the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.sampling.sampler import Needs, Plan
from cuda_graphs.decode_graph import GraphContext, narrow_logits
from forward.attention import Attention
from phases.appendix.drafting_in_graphs.columns import by_columns
from phases.appendix.drafting_in_graphs.kernels import side_by_side
from phases.appendix.latency.linear import add_way
from speculative.head import Head, ReducedHead
from triton_paged_attention.linear import FusedLinear


class ModelDrafts:
    """A model that reads nothing but tokens.

    names: `[N]`, the token ids of what `choose` returns; None: it returns token ids.
    """

    names: Tensor | None = None

    def __init__(self, on: GraphContext) -> None:
        self.on = on

    def catch_up(self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Compute the places that were verified, of which `hidden` is what the large model made: `[T, h]`."""
        out: Tensor = self.on.model(ids, positions, attention)
        return out

    def go_on(self, positions: Tensor) -> None:
        """The positions of all steps to come, `[K - 1, B]`."""
        self.positions = positions

    def step(self, number: int, ids: Tensor, last: Tensor, attention: Attention) -> Tensor:
        """Step `number`, from 0, on the newest drafts; `last` came of the step before: `[B, h]`."""
        out: Tensor = self.on.model(ids, self.positions[number], attention)
        return out

    def choose(self, last: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """One draft of each request, `[B]` int64."""
        return self.on.sampler.sample(narrow_logits(self.on.model, last), rows, (), steps, plan).tokens


class HeadDrafts(ModelDrafts):
    """A head, which also reads hidden states: `kept [T, taps * h]` between the layers, and the last ones.

    plan: how all drafts are sampled.
    """

    def __init__(self, on: GraphContext, kept: Tensor, plan: Plan) -> None:
        super().__init__(on)
        head = on.model
        assert isinstance(head, Head) and isinstance(head.lm_head, ReducedHead)
        self.head, self.kept = head, kept
        self._mix, self._fuse, self._logits = (
            _quick(weight) for weight in (head.mix_states.weight, head.fuse.weight, head.lm_head.weight)
        )
        self._state_norms = _stacked(*head.state_norms, head.norm)  # the last is not used
        self._input_norms = _stacked(head.token_norm, head.feature_norm)
        if plan.features == Needs(0):  # noise belongs to token ids, the largest logit to nobody
            self.names = head.lm_head.ids

    def catch_up(self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """See `ModelDrafts.catch_up`."""
        states = side_by_side(self.kept, hidden, self._state_norms, self.head.config.norm_eps)
        return self._layers(ids, self._mix(states), self.head.rope(positions), attention)

    def go_on(self, positions: Tensor) -> None:
        """See `ModelDrafts.go_on`."""
        self._angles = [x.unflatten(0, positions.shape) for x in self.head.rope(positions.flatten())]

    def step(self, number: int, ids: Tensor, last: Tensor, attention: Attention) -> Tensor:
        """See `ModelDrafts.step`."""
        cos, sin = self._angles
        return self._layers(ids, last, (cos[number], sin[number]), attention)

    def choose(self, last: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """See `ModelDrafts.choose`; columns of the reduced head where `names` says which they are."""
        if self.names is None:
            return super().choose(last, rows, steps, plan)
        return self.on.sampler.sample(self._logits(last), rows, (), steps, plan).tokens

    def _layers(
        self, ids: Tensor, features: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """`Head.step`."""
        table, eps = self.head.embed_tokens.weight, self.head.config.norm_eps
        given = side_by_side(table, features, self._input_norms, eps, ids=ids, norm_last=True)
        return self.head.through(self._fuse(given), cos_sin, attention)


def _quick(weight: Tensor) -> FusedLinear:
    """A projection with kernels for one token and for a few; the weight is shared."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    fused = FusedLinear(linear)
    add_way(fused)
    return by_columns(fused, fewest=1)


def _stacked(*norms: nn.Module) -> Tensor:
    """The norms' weights, `[len(norms), h]`."""
    return torch.stack([norm.get_parameter("weight") for norm in norms])
