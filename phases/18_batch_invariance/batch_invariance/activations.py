"""Activations of which each number has the same bits wherever it stands in a tensor.

On a CPU PyTorch computes most of a tensor in vector registers and what remains at its end one by one, and for
`silu` and `gelu` the two round differently. `exp`, `tanh` and `erf` have one result in both places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from forward.layers import GatedMLP
from forward.model import Model
from forward.models.gpt2 import GPT2MLP


def silu(x: Tensor) -> Tensor:
    """Return `x / (1 + exp(-x))`, in float32 and then in `x`'s dtype."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form, in float32 and then in `x`'s dtype."""
    wide = x.float()
    inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return GELU by the error function, in float32 and then in `x`'s dtype."""
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * 0.7071067811865476))).to(x.dtype)


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""By the names of `forward.layers.ACTIVATIONS`."""


def fix_activations(model: Model) -> None:
    """Give every MLP in plain torch the activation of this module, in place."""
    for part in model.modules():
        if isinstance(part, GatedMLP | GPT2MLP):
            part.act = FIXED[model.config.activation]
