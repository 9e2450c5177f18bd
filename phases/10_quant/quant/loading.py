"""Linear layers become quantized while a model is loaded: one at a time, so that two copies never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import assign
from forward.model import Model
from quant.blocks import METHOD, expect_blocks, tie_blocks
from quant.formats import Scheme
from quant.linear import QuantLinear, quantized

HEAD = "lm_head"


class Quantize:
    """Phase 01's `WeightLoader`: plain layers become quantized ones.

    scheme: of every linear layer but the head; None: they stay as they are.
    head: of the head; None: it stays as it is. A function is asked for each device.
    """

    def __init__(
        self,
        scheme: Scheme | None = None,
        head: Scheme | Callable[[torch.device], Scheme | None] | None = None,
    ) -> None:
        self.scheme, self.head = scheme, head

    def wanted(self, name: str, device: torch.device) -> Scheme | None:
        """Return what is to be made of the plain layer `name`, whose weight is on `device`."""
        if name != HEAD:
            return self.scheme
        return self.head(device) if callable(self.head) else self.head

    def reading(self) -> Quantize:
        """Return one that reads the same checkpoints and quantizes nothing."""
        return type(self)()

    def expect(self, model: Model) -> None:
        """See `WeightLoader.expect`: of quantized checkpoints only the blocks of a GGUF file are read."""
        stored = model.config.quantization
        if stored is None:
            return
        if stored["quant_method"] != METHOD:
            raise UserError(
                "the checkpoint is quantized already, which only checkpoint_formats reads: it is off"
            )
        if self.scheme is not None:
            raise UserError(
                f"quantization is {self.scheme.name!r}, but the checkpoint is quantized already: leave it out"
            )
        expect_blocks(model, stored["types"])

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `WeightLoader.place`: a weight that is to be quantized is so at once, and then let go of."""
        owner, _, leaf = name.rpartition(".")
        scheme = self.wanted(owner, tensor.device)
        layer = model.get_submodule(owner)
        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):
            assign(model, name, tensor)
            return
        # The bias is on `meta` until it is placed in its turn.
        replace_layer(model, owner, QuantLinear(quantized(tensor, scheme, owner), layer.bias))

    def finish(self, model: Model) -> Model:
        """See `WeightLoader.finish`."""
        tie_blocks(model)
        for name in plain_layers(model):
            layer = model.get_submodule(name)
            scheme = self.wanted(name, model.device)
            if scheme is not None and isinstance(layer, nn.Linear):
                replace_layer(model, name, QuantLinear.of(layer, scheme, name))
        return model

    def changes(self, model: Model) -> bool:
        """See `WeightLoader.changes`."""
        return any(self.wanted(name, model.device) is not None for name in plain_layers(model))


def plain_layers(model: nn.Module) -> list[str]:
    """Return names, not layers: a list of these would keep them all alive until the last is replaced."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of `name`."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, layer)
