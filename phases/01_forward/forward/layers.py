"""Layers that several model families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function that configurations call ``name``, or raise `UserError`."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported, only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Embedding(nn.Embedding):
    """`nn.Embedding` without random weights: drawing these on `meta` imports a compiler, 1 s and 60 MB."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is: a checkpoint or `random_model` fills it."""


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., size]`` normalized, in ``x``'s dtype."""
        weight = self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Normalization by mean and variance, with weight and bias, in float32 (arXiv 1607.06450)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., size]`` normalized, in ``x``'s dtype."""
        weight, bias = self.weight.float(), self.bias.float()
        normalized = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return normalized.to(x.dtype)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``: SwiGLU with SiLU, GeGLU with GELU (arXiv 2002.05202)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, act: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``down(act(gate(x)) * up(x))``: ``[..., hidden]`` -> ``[..., hidden]``."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
