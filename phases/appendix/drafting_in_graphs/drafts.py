"""A head inside the graph, in a third of the kernels.

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


class HeadDrafts:
    """A head, which reads hidden states: `kept [T, taps * h]` between the layers, and the last ones.

    plan: how all drafts are sampled.
    names: `[N]`, the token ids of what `choose` returns; None: it returns token ids.
    """

    names: Tensor | None = None

    def __init__(self, on: GraphContext, kept: Tensor, plan: Plan) -> None:
        head = on.model
        assert isinstance(head, Head) and isinstance(head.lm_head, ReducedHead)
        self.on, self.head, self.kept, self.plan = on, head, kept, plan
        self._mix, self._fuse, self._logits = (
            _quick(weight) for weight in (head.mix_states.weight, head.fuse.weight, head.lm_head.weight)
        )
        self._state_norms = _stacked(*head.state_norms, head.norm)  # the last is not used
        self._input_norms = _stacked(head.token_norm, head.feature_norm)
        if plan.features == Needs(0):  # noise belongs to token ids, the largest logit to none
            self.names = head.lm_head.ids

    def catch_up(self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Compute the places that were verified, of which `hidden` is what the large model made: `[T, h]`."""
        states = side_by_side(self.kept, hidden, self._state_norms, self.head.config.norm_eps)
        return self._layers(ids, self._mix(states), self.head.rope(positions), attention)

    def go_on(self, positions: Tensor) -> None:
        """Take in the positions of all steps to come, `[K - 1, B]`."""
        self._angles = [x.unflatten(0, positions.shape) for x in self.head.rope(positions.flatten())]

    def step(self, number: int, ids: Tensor, last: Tensor, attention: Attention) -> Tensor:
        """Step `number`, from 0, on the newest drafts; `last` came of the step before: `[B, h]`."""
        cos, sin = self._angles
        return self._layers(ids, last, (cos[number], sin[number]), attention)

    def choose(self, last: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        """One draft of each request, `[B]` int64: its place in `names` where there are any."""
        logits = narrow_logits(self.head, last) if self.names is None else self._logits(last)
        return self.on.sampler.sample(logits, rows, (), steps, self.plan).tokens

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
