"""Activations of which each number has the same bits wherever it is in a tensor.

On a CPU PyTorch computes most of a tensor in vector registers and what remains at its end one by one, and for
`silu` and `gelu` the two round differently. `exp`, `tanh` and `erf` have one result in both cases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forward.layers import GatedMLP
from forward.model import Model
from forward.models.gpt2 import GPT2MLP


def silu(x: Tensor) -> Tensor:
    """Return SiLU, `x / (1 + exp(-x))`, same shape, computed in float32 and returned in `x`'s dtype."""
    x32 = x.float()
    return (x32 / (1 + torch.exp(-x32))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form, same shape, computed in float32 and returned in `x`'s dtype."""
    x32 = x.float()
    inner = 0.7978845608028654 * (x32 + 0.044715 * x32 * x32 * x32)
    return (0.5 * x32 * (1 + torch.tanh(inner))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return GELU by the error function, same shape, computed in float32 and returned in `x`'s dtype."""
    x32 = x.float()
    return (0.5 * x32 * (1 + torch.erf(x32 * 0.7071067811865476))).to(x.dtype)


FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""By the names of `forward.layers.ACTIVATIONS`."""


def fix_activations(model: Model) -> None:
    """Replace a model's MLP activations, in place, by functions whose bits no batch changes.

    MLPs in plain torch get this module's function of the same name; others stay.
    """
    for part in model.modules():
        if isinstance(part, GatedMLP | GPT2MLP):
            part.act = FIXED[model.config.activation]
