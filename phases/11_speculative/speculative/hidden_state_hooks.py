"""Hidden states between the layers of a model, taken by surgery: the model's own code knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forward.model import Model


def hooked_layers(layers: int) -> tuple[int, int]:
    """Return the indices of a low and a middle layer of `layers`; EAGLE-3 reads them and the last one."""
    return min(2, layers - 1), layers // 2


class HiddenStateHooks:
    """Forward hooks that store the outputs of some layers in each step, at an address that never changes.

    A hook after each layer copies its output; a CUDA graph captures that with the layer. The engine with
    these hooks owns its model, so that no other engine runs them.

    layers: indices of the layers. tokens: most tokens of a step.

    kept: `[tokens, len(layers) * hidden]`, the outputs in the newest step, in the order of its tokens.
    """

    def __init__(self, model: Model, layers: Sequence[int], tokens: int) -> None:
        hidden = model.config.hidden_size
        self.kept = torch.zeros(
            tokens, len(layers) * hidden, dtype=model.dtype, device=model.device
        )
        for slot, layer in enumerate(layers):
            part = self.kept[:, slot * hidden : (slot + 1) * hidden]
            model.get_submodule(f"layers.{layer}").register_forward_hook(partial(_keep, part))


def _keep(kept: Tensor, layer: nn.Module, given: Any, out: Any) -> None:
    x = stream(out)
    kept[: len(x)].copy_(x)


def stream(out: Any) -> Tensor:
    """Return a layer's output `out` as one tensor `[T, hidden]`.

    Fused layers return two tensors whose sum is the output.
    """
    whole: Tensor = out if isinstance(out, Tensor) else out[0] + out[1]
    return whole
