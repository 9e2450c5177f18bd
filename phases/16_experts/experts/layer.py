"""The layer of experts in its plainest form: a loop over experts, which every faster form must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.config import ExpertConfig, ModelConfig
from experts.routing import route
from forward.layers import GatedMLP


class ExpertRouter(nn.Module):
    """The router of a layer of experts: scores every expert for every token.

    It is no `nn.Linear`, so quantization leaves it alone: its weight is small, and a wrong expert costs
    more than a rounded one.
    """

    def __init__(self, hidden_size: int, count: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden_size))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states `[T, hidden]` to the experts' scores (logits) `[T, E]`."""
        return F.linear(x, self.weight, self.bias)


def loop_over_experts(
    experts: Sequence[Callable[[Tensor], Tensor]], x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, computed one expert after the other.

    In a CUDA graph, where no shape may depend on what was chosen, every expert computes all tokens.

    Args:
        experts: functions from `[rows, hidden]` to `[rows, hidden]`.
        x: `[T, hidden]`.
        weights: `[T, k]`, how much each choice counts.
        chosen: `[T, k]`, numbers of experts. A choice that is no number of `experts` adds nothing.

    Returns:
        `[T, hidden]` float32, each token's weighted sum.
    """
    all_rows = torch.arange(len(x), device=x.device)
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    total = torch.zeros_like(x, dtype=torch.float32)
    for number, expert in enumerate(experts):
        weight = (weights * (chosen == number)).sum(dim=1)  # [T], 0 where it was not chosen
        rows = all_rows if recording else weight.nonzero()[:, 0]
        if len(rows):
            total.index_add_(0, rows, weight[rows, None] * expert(x[rows]))
    return total


class ExpertModules(nn.ModuleList):
    """The experts of a layer as a plain list of MLPs, computed one after the other."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, `[T, hidden]` float32.

        x: `[T, hidden]`. weights, chosen: `[T, k]`, the router's weights and numbers of experts; the number
            of an expert that this module does not hold adds nothing.
        """
        return loop_over_experts(list(self), x, weights, chosen)

    def only(self, own: range) -> ExpertModules:
        """Return a list that has only the experts with the numbers `own`, renumbered from 0."""
        return ExpertModules(self[own.start : own.stop])


class Experts(nn.Module):
    """A mixture of experts (arXiv 1701.06538): each token goes through the `top_k` MLPs its router prefers.

    Parts are named as in Qwen's checkpoints: `gate` is the router, and no part of an MLP. The shared expert
    (arXiv 2401.06066), if the model has one, is an MLP that every token goes through.

    experts: `ExpertModules` or `GroupedExperts`, called with `x`, `weights` and `chosen`.
    first: number of the first expert that this rank has, subtracted from the chosen numbers.
    all_reduce: sums outputs over ranks; None on a single rank.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.facts: ExpertConfig = config.experts
        hidden, facts = config.hidden_size, config.experts
        self.route = route
        self.first = 0
        self.all_reduce: Callable[[Tensor], Tensor] | None = None
        self.gate = ExpertRouter(hidden, facts.count)
        self.experts: nn.Module = ExpertModules(
            GatedMLP(hidden, facts.intermediate_size, config.activation)
            for _ in range(facts.count)
        )
        if facts.shared_size:
            self.shared_expert = GatedMLP(hidden, facts.shared_size, config.activation)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states `[..., hidden]` to weighted sums of experts' outputs, same shape and dtype."""
        flat = x.flatten(0, -2)  # [T, hidden]
        weights, chosen = self.route(
            self.gate(flat), self.facts.top_k, self.facts.normalize
        )  # [T, k] each
        total: Tensor = self.experts(
            flat, weights, chosen - self.first if self.first else chosen
        )
        if self.all_reduce is not None:
            total = self.all_reduce(total.to(x.dtype))
        if self.facts.shared_size:
            gate = torch.sigmoid(self.shared_expert_gate(flat))
            total = total + gate * self.shared_expert(flat)
        return total.to(x.dtype).view(x.shape)
