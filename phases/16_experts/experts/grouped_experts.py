"""The experts of a layer in two tensors, and ways to compute them in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from experts.layer import ExpertModules, loop_over_experts
from experts.routing import sort_by_expert
from experts.weights import ExpertWeights, Swiglu, stack_layers


class GroupedExperts(nn.Module):
    """All experts of a layer, as two products with one tensor each, and an activation between them.

    gate_up: `[E, 2 I, hidden]`, for each of E experts I gates and then I ups. down: `[E, hidden, I]`.
    act: the activation, from gates and ups to `I` numbers.
    kernels: `(most, small, large)`: `small` computes steps of up to `most` tokens, `large` all others. At
        first both are a plain loop over experts; the feature `MixtureOfExperts` puts faster functions here.
    """

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, act: Swiglu) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.act = act
        self.kernels: tuple[int, ExpertKernel, ExpertKernel] = (0, one_by_one, one_by_one)

    @property
    def count(self) -> int:
        """Return how many experts the layer has on this rank."""
        return len(self.down.data)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, `[T, hidden]`.

        x: `[T, hidden]`. weights: `[T, k]`, the router's weights. chosen: `[T, k]`, numbers of experts; a
            number that this rank does not have adds nothing.
        """
        most, small, large = self.kernels
        return (small if len(x) <= most else large)(self, x, weights, chosen)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """Return the outputs `[T, hidden]` of one expert for `x [T, hidden]`, in plain torch.

        expert: its number on this rank. The weights may be plain or MXFP4, not of eight bits.
        """
        return self.down.multiply(expert, self.act(self.gate_up.multiply(expert, x)))

    def only(self, own: range) -> GroupedExperts:
        """Return a copy that has only the experts with the numbers `own`, renumbered from 0."""
        return GroupedExperts(self.gate_up.only(own), self.down.only(own), self.act)


ExpertKernel = Callable[[GroupedExperts, Tensor, Tensor, Tensor], Tensor]
"""Computes a layer's experts: layer, `x [T, hidden]`, `weights [T, k]`, `chosen [T, k]` -> `[T, hidden]`.

A choice that is no number of an expert here belongs to another rank and adds nothing.
"""


def group_experts(experts: nn.Module, activation: str) -> GroupedExperts:
    """Return a layer's experts as `GroupedExperts`: MLPs stacked in two tensors, MXFP4 unpacked.

    experts: `ExpertModules` or `GroupedExperts`. activation: its name in the model's configuration, such as
        "silu", for `ExpertModules`; `GroupedExperts` have their own.
    """
    if isinstance(experts, ExpertModules):
        gate_up = stack_layers([[one.gate_proj, one.up_proj] for one in experts])  # type: ignore[list-item]
        down = stack_layers([[one.down_proj] for one in experts])  # type: ignore[list-item]
        made = GroupedExperts(gate_up, down, Swiglu(activation))
    else:
        assert isinstance(experts, GroupedExperts)
        made = GroupedExperts(experts.gate_up.unpacked(), experts.down.unpacked(), experts.act)
    made.kernels = (1, one_token, sorted_loop)
    return made


def one_by_one(layer: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, `[T, hidden]`, in plain torch.

    Computes one expert after the other. x: `[T, hidden]`. weights, chosen: `[T, k]`, the router's weights and
    numbers of experts.
    """
    experts = [partial(layer.multiply, number) for number in range(layer.count)]
    return loop_over_experts(experts, x, weights, chosen)


def sorted_loop(layer: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, `[T, hidden]`, in plain torch.

    x: `[T, hidden]`. weights, chosen: `[T, k]`, the router's weights and numbers of experts. Tokens are
        sorted by expert, and each expert multiplies its own. The function waits for the device to learn how
        many tokens each expert has, so no CUDA graph can hold it.
    """
    order, offsets = sort_by_expert(chosen, layer.count)
    rows = x[order // chosen.shape[1]]  # [T k, hidden], expert by expert
    products = torch.zeros_like(rows)  # 0 for choices of another GPU's experts
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start < end:
            products[start:end] = layer.multiply(expert, rows[start:end])
    return combine(products, order, weights)


def one_token(layer: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the weighted sum of a single token's experts, `[1, hidden]`, in plain torch.

    x: `[1, hidden]`. weights, chosen: `[1, k]`, the router's weights and numbers of experts. There is
        nothing to sort, which saves two thirds of the calls on a CPU.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for weight, expert in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
        if 0 <= expert < layer.count:
            total += weight * layer.multiply(expert, x).float()
    return total.to(x.dtype)


def combine(products: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return, for each token, the weighted sum of the outputs of its experts.

    A token's outputs are added in the order of its choices, so the sum does not depend on the rest of the
    batch.

    Args:
        products: `[T k, hidden]`, the experts' outputs, sorted by expert.
        order: `[T k]`, the choice that each product is of; choice `j` of token `t` is `t * k + j`.
        weights: `[T, k]` float32, the weight of each choice.

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
