"""The experts of a layer in two tensors, and the ways to compute them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from experts.kernels.stack import ExpertStack, Swiglu
from experts.routing import sort_by_expert


class StackedExperts(nn.Module):
    """`ExpertList` with the weights of all in two stacks.

    gate_up: of every expert `[2 I, hidden]`, its gates and then its ups. down: `[hidden, I]`.
    ways: the most tokens that the first `ExpertKernel` computes, that way, and the one for more; here in
    plain torch.
    """

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, act: Swiglu) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.act = act
        self.kernels: tuple[int, ExpertKernel, ExpertKernel] = (1, one_token, sorted_loop)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertKernel`."""
        most, few, many = self.kernels
        return (few if len(x) <= most else many)(self, x, weights, chosen)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`, through one expert of plain weights."""
        return self.down.multiply(expert, self.act(self.gate_up.multiply(expert, x)))


ExpertKernel = Callable[[StackedExperts, Tensor, Tensor, Tensor], Tensor]
"""Layer, `x [T, hidden]`, `weights` and `chosen [T, k]` -> `[T, hidden]`, the weighted sums.

A choice that is no number of an expert here, but of one on another rank, adds nothing.
"""


def sorted_loop(layer: StackedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A `ExpertKernel` in plain torch: tokens are sorted by expert, and each expert multiplies its own.

    It waits for the device to learn how many tokens each expert has, so no graph can be recorded of it.
    """
    order, offsets = sort_by_expert(chosen, len(layer.down.data))
    rows = x[order // chosen.shape[1]]  # [T k, hidden], expert by expert
    products = torch.zeros_like(rows)  # another rank's experts add nothing here
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            products[start:end] = layer.multiply(expert, rows[start:end])
    return combine(products, order, weights)


def one_token(layer: StackedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A `ExpertKernel` in plain torch for one token on a CPU: nothing to sort, and a third of the calls."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for weight, expert in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
        if 0 <= expert < len(layer.down.data):  # another rank's add nothing here
            total += weight * layer.multiply(expert, x).float()
    return total.to(x.dtype)


def combine(products: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Bring the experts' products back to their tokens and sum them, in the order of a token's choices.

    The order of the sum is the token's own, so it does not depend on the rest of the batch.

    Args:
        products: `[T k, hidden]`, expert by expert.
        order: see `sort_by_expert`.
        weights: `[T, k]` float32.

    Returns:
        `[T, hidden]` in the dtype of `products`; sums are in float32.
    """
    tokens, top_k = weights.shape
    back = torch.empty_like(products)
    back[order] = products
    by_token = back.view(tokens, top_k, -1)
    total = torch.zeros(
        tokens, products.shape[-1], dtype=torch.float32, device=products.device
    )
    for place in range(top_k):
        total += weights[:, place, None] * by_token[:, place]
    return total.to(products.dtype)
