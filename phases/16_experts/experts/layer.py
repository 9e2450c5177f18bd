"""The layer of experts, the plainest there is: what every faster form of it must come to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.config import ExpertConfig, ModelConfig
from experts.kernels.stack import ExpertStack, Swiglu, stacked
from experts.routing import route
from forward.layers import GatedMLP


class ExpertRouter(nn.Module):
    """A score for each expert. It is no `nn.Linear`, so that whatever rounds these leaves it alone.

    Its weight is small, and a wrong expert costs more than a rounded one.
    """

    def __init__(self, hidden_size: int, count: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden_size))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, E]`."""
        return F.linear(x, self.weight, self.bias)


class ExpertList(nn.ModuleList):
    """The experts of a layer, each an MLP of its own."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`x [T, hidden]`, `weights` and `chosen [T, k]` -> `[T, hidden]` float32, the weighted sums.

        An expert computes the rows of the tokens that chose it. In a CUDA graph, where no shape may depend on
        what was chosen, every expert computes all of them.
        """
        everything = torch.arange(len(x), device=x.device)
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        total = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(self):
            share = (weights * (chosen == number)).sum(dim=1)  # [T], 0 where it was not chosen
            rows = everything if recorded else share.nonzero()[:, 0]
            if len(rows):
                total.index_add_(0, rows, share[rows, None] * expert(x[rows]))
        return total

    def only(self, own: range) -> ExpertList:
        """Return the list of some experts alone."""
        return ExpertList(self[own.start : own.stop])

    def stacks(self, kind: str) -> tuple[ExpertStack, ExpertStack, Swiglu]:
        """Return `gate_up`, `down`, and the function between them.

        kind: of the activation, as a model's configuration names it.
        """
        gate_up = stacked([[expert.gate_proj, expert.up_proj] for expert in self])  # type: ignore[list-item]
        return gate_up, stacked([[expert.down_proj] for expert in self]), Swiglu(kind)  # type: ignore[list-item]


class Experts(nn.Module):
    """A mixture of experts (arXiv 1701.06538): each token goes through the `top_k` MLPs its router prefers.

    Parts are named as in Qwen's checkpoints: `gate` is the router, and no part of an MLP. The shared expert
    (arXiv 2401.06066), if there is one, is an MLP that every token goes through.

    first: the number of the first expert that is here, on this rank.
    total: adds up the outputs of all ranks; None: there are no others.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.facts: ExpertConfig = config.experts
        hidden, facts = config.hidden_size, config.experts
        self.route = route
        self.first = 0
        self.total: Callable[[Tensor], Tensor] | None = None
        self.gate = ExpertRouter(hidden, facts.count)
        self.experts: nn.Module = ExpertList(
            GatedMLP(hidden, facts.intermediate_size, config.activation)
            for _ in range(facts.count)
        )
        if facts.shared_size:
            self.shared_expert = GatedMLP(hidden, facts.shared_size, config.activation)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        flat = x.flatten(0, -2)  # [T, hidden]
        weights, chosen = self.choose(flat)
        total: Tensor = self.experts(
            flat, weights, chosen - self.first if self.first else chosen
        )
        if self.total is not None:
            total = self.total(total.to(x.dtype))
        if self.facts.shared_size:
            total = total + torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(
                flat
            )
        return total.to(x.dtype).view(x.shape)

    def choose(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, hidden]` -> each token's weights and experts, `[T, k]`; see `route`."""
        weights, chosen = self.route(self.gate(flat), self.facts.top_k, self.facts.normalize)
        return weights if self.facts.weighted else torch.ones_like(weights), chosen
