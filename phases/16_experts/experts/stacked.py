"""The experts of a layer in two tensors, and the ways to compute them.

`Stacking` makes them while a model is loaded, one layer at a time: no more than one layer's weights are there
twice.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from experts.kernels.stack import ExpertStack, Swiglu, stacked
from experts.layer import Experts, Route, choose
from experts.routing import route, sort_by_expert
from forward.loading import Linears
from forward.model import Model
from quant.loading import replace_layer


class ExpertWay(Protocol):
    """A way to compute a layer's experts for some numbers of tokens."""

    def takes(self, tokens: int) -> bool:
        """Return whether it computes this many tokens."""
        ...

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`x [T, hidden]`, `weights` and `chosen [T, k]` -> `[T, hidden]`, the weighted sums."""
        ...


@runtime_checkable
class Stacks(Protocol):
    """A family's experts that lie in stacks already."""

    def stacks(self) -> tuple[ExpertStack, ExpertStack, Swiglu]:
        """Return `gate_up`, `down`, and the function between them."""
        ...


def stacks_of(layer: Experts, kind: str) -> tuple[ExpertStack, ExpertStack, Swiglu]:
    """Return a layer's experts as `Stacks.stacks` does."""
    if isinstance(layer.experts, Stacks):
        return layer.experts.stacks()
    gate_up = stacked([[expert.gate_proj, expert.up_proj] for expert in layer.experts])  # type: ignore[list-item]
    return gate_up, stacked([[expert.down_proj] for expert in layer.experts]), Swiglu(kind)  # type: ignore[list-item]


class StackedExperts(nn.Module):
    """`Experts` with the weights of all in two stacks; it asks its ways, plain torch last.

    gate_up: of every expert `[2 I, hidden]`, its gates and then its ups. down: `[hidden, I]`.
    kind: of the activation, as a model's configuration names it.
    """

    def __init__(self, old: Experts, kind: str) -> None:
        super().__init__()
        self.facts, self.gate = old.facts, old.gate
        self.route: Route = route
        gate_up, down, self.act = stacks_of(old, kind)
        self.keep(gate_up, down)
        self.shared = SharedExpert(old) if old.facts.shared_size else None

    def keep(self, gate_up: ExpertStack, down: ExpertStack) -> None:
        """Compute with these stacks, or with a rank's part of them, in plain torch."""
        self.gate_up, self.down = gate_up, down
        for name, stack in (("gate_up", gate_up), ("down", down)):  # as the model's memory is counted
            self.register_buffer(f"{name}_data", stack.data)
            self.register_buffer(f"{name}_scale", stack.scale)
            self.register_buffer(f"{name}_bias", stack.bias)
        self.ways: list[ExpertWay] = [way(gate_up, down, self.act) for way in (TokenAlone, SortedLoop)]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        flat = x.flatten(0, -2)
        weights, chosen = self.choose(flat)
        total = next(way for way in self.ways if way.takes(len(flat)))(flat, weights, chosen)
        if self.shared is not None:
            total = total + self.shared(flat)
        return total.view(x.shape)

    def choose(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """See `choose` of the layer."""
        return choose(self.gate(flat), self.facts, self.route)


class SharedExpert(nn.Module):
    """The expert that every token goes through, with its own gate."""

    def __init__(self, old: Experts) -> None:
        super().__init__()
        self.mlp, self.gate = old.shared_expert, old.shared_expert_gate

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class SortedLoop:
    """Plain torch: tokens sorted by expert, and each expert multiplies its own.

    It reads plain weights. It waits for the device to learn how many tokens each expert has, so no graph can
    be recorded of it.
    """

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, act: Swiglu) -> None:
        self.gate_up, self.down, self.act = gate_up, down, act

    def takes(self, tokens: int) -> bool:
        """Any number of tokens."""
        return True

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


class TokenAlone(SortedLoop):
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


class Stacking:
    """Phase 01's `Linears` around another: experts are stacked when all weights are there.

    eight: stack experts of eight bits too, for kernels that read them. Otherwise these stay as phase 10 made
        them, one by one.
    """

    def __init__(self, inner: Linears, *, eight: bool = False) -> None:
        self.inner, self.eight = inner, eight

    def expect(self, model: Model) -> None:
        """See `Linears.expect`."""
        self.inner.expect(model)

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `Linears.place`."""
        self.inner.place(model, name, tensor)

    def finish(self, model: Model) -> Model:
        """See `Linears.finish`."""
        model = self.inner.finish(model)
        for name in self._layers(model):
            layer = model.get_submodule(name)
            assert isinstance(layer, Experts)
            replace_layer(model, name, StackedExperts(layer, model.config.activation))
        return model

    def changes(self, model: Model) -> bool:
        """See `Linears.changes`."""
        return self.inner.changes(model) or bool(self._layers(model))

    def _layers(self, model: nn.Module) -> list[str]:
        """Return the names of what is to be stacked, not the layers: a list would keep them all alive."""
        found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Experts)]
        return [name for name, layer in found if self.eight or _plain(layer)]


def _plain(layer: Experts) -> bool:
    return isinstance(layer.experts, Stacks) or all(
        isinstance(part, nn.Linear) for expert in layer.experts for part in expert.children()
    )
