"""The experts of a layer in two tensors, and the ways to compute them.

`stack` makes them when a model is loaded, one layer at a time: no more than one layer's weights are there
twice.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from experts.kernels.stack import ExpertStack, ExpertWay, Swiglu
from experts.layer import ExpertList
from experts.routing import sort_by_expert
from forward.model import Model
from quant.linear import QuantLinear
from quant.loading import replace_layer


class StackedExperts(nn.Module):
    """`ExpertList` with the weights of all in two stacks; it asks its ways, in plain torch at first.

    gate_up: of every expert `[2 I, hidden]`, its gates and then its ups. down: `[hidden, I]`.
    first: the number of the first expert that is here, on this rank.
    total: adds up the outputs of all ranks; None: there are no others.
    """

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, act: Swiglu) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act
        self.first = 0
        self.total: Callable[[Tensor], Tensor] | None = None
        self.use(TokenAlone, SortedLoop)

    def use(self, *ways: type[ExpertWay]) -> None:
        """Compute in the first of these ways that takes a number of tokens."""
        self.ways = [way(self.gate_up, self.down, self.act) for way in ways]

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertWay`."""
        way = next(way for way in self.ways if way.takes(len(x)))
        if self.total is None:
            return way(x, weights, chosen)
        return self.total(way(x, weights, chosen - self.first))


class SortedLoop(ExpertWay):
    """Plain torch: tokens sorted by expert, and each expert multiplies its own.

    It reads plain weights. It waits for the device to learn how many tokens each expert has, so no graph can
    be recorded of it.
    """

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertWay`."""
        order, offsets = sort_by_expert(chosen, len(self.down.data))
        rows = x[order // chosen.shape[1]]  # [T k, hidden], expert by expert
        products = torch.zeros_like(rows)  # another rank's experts add nothing here
        for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
            if start < end:
                inner = self.act(self.gate_up.multiply(expert, rows[start:end]))
                products[start:end] = self.down.multiply(expert, inner)
        return combine(products, order, weights)


class TokenAlone(ExpertWay):
    """Plain torch for one token on a CPU: nothing to sort, and a third of the calls."""

    def takes(self, tokens: int) -> bool:
        """See `ExpertWay`."""
        return tokens == 1

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertWay`."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for weight, expert in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
            if 0 <= expert < len(self.down.data):  # another rank's add nothing here
                inner = self.act(self.gate_up.multiply(expert, x))
                total += weight * self.down.multiply(expert, inner).float()
        return total.to(x.dtype)


def combine(products: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Bring the experts' products back to their tokens and sum them, in the order of a token's choices.

    The order of the sum is the token's own, so it does not depend on who else is in the batch.

    Args:
        products: `[T k, hidden]`, expert by expert.
        order: see `Sorted`.
        weights: `[T, k]` float32.

    Returns:
        `[T, hidden]` in the dtype of `products`; sums are in float32.
    """
    tokens, top_k = weights.shape
    back = torch.empty_like(products)
    back[order] = products
    by_token = back.view(tokens, top_k, -1)
    total = torch.zeros(tokens, products.shape[-1], dtype=torch.float32, device=products.device)
    for place in range(top_k):
        total += weights[:, place, None] * by_token[:, place]
    return total.to(products.dtype)


def stack(model: Model, eight: bool) -> None:
    """Put a model's experts into stacks, one layer after the other.

    eight: those of eight bits as well, for kernels, which read them. Otherwise experts of few bits stay as
        phase 10 made them, one by one.
    """
    # Names, not layers: a list of these would keep them all alive.
    for name in [name for name, part in model.named_modules() if isinstance(part, ExpertList)]:
        experts = model.get_submodule(name)
        assert isinstance(experts, ExpertList)
        if eight or not any(isinstance(layer, QuantLinear) for layer in experts.modules()):
            replace_layer(model, name, StackedExperts(*experts.stacks(model.config.activation)))
