"""The layer of experts, the plainest there is: what every faster form of it must come to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.config import ExpertConfig, ModelConfig
from experts.routing import route
from forward.layers import GatedMLP

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
"""`route`, or what does the same."""


class ExpertRouter(nn.Module):
    """A score for each expert. It is no `nn.Linear`, so that whatever rounds these leaves it alone.

    Its weight is small, and a wrong expert costs more than a rounded one.
    """

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, E]` float32."""
        return F.linear(x, self.weight).float()


def choose(logits: Tensor, facts: ExpertConfig, by: Route = route) -> tuple[Tensor, Tensor]:
    """Return each token's weights and experts, as `route` does, by a model's facts."""
    weights, chosen = by(logits, facts.top_k, facts.normalize)
    return weights if facts.weighted else torch.ones_like(weights), chosen


class Experts(nn.Module):
    """A mixture of experts (arXiv 1701.06538): each token goes through the `top_k` MLPs its router prefers.

    Parts are named as in Qwen's checkpoints: `gate` is the router, and no part of an MLP. The shared expert
    (arXiv 2401.06066), if there is one, is an MLP that every token goes through.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.facts: ExpertConfig = config.experts
        hidden, facts = config.hidden_size, config.experts
        self.gate = ExpertRouter(hidden, facts.count)
        self.experts = nn.ModuleList(
            GatedMLP(hidden, facts.intermediate_size, config.activation) for _ in range(facts.count)
        )
        if facts.shared_size:
            self.shared_expert = GatedMLP(hidden, facts.shared_size, config.activation)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`; an expert computes the rows of the tokens that chose it.

        In a CUDA graph, where no shape may depend on what was chosen, every expert computes all of them.
        """
        flat = x.flatten(0, -2)  # [T, hidden]
        share = self.shares(flat)  # [T, E]
        everything = torch.arange(len(flat), device=x.device)
        recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        total = torch.zeros_like(flat, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows = everything if recorded else share[:, number].nonzero()[:, 0]
            if len(rows):
                total.index_add_(0, rows, share[rows, number, None] * expert(flat[rows]))
        if self.facts.shared_size:
            total += torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return total.to(x.dtype).view(x.shape)

    def shares(self, flat: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, E]` float32: each expert's weight in a token's sum, 0 where not chosen."""
        logits = self.gate(flat)
        weights, chosen = choose(logits, self.facts)
        return torch.zeros_like(logits).scatter(1, chosen, weights)
