"""Quantize linear layers while a model is loaded, one at a time: two copies of the weights never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import assign
from forward.model import Model
from quant.blocks import METHOD, BlockLinear, expect_blocks, tied_blocks
from quant.formats import Scheme
from quant.linear import QuantLinear, quantized

HEAD = "lm_head"


class Quantize:
    """A loader of checkpoints that replaces plain linear layers by quantized ones; implements `WeightLoader`.

    scheme: the format of every linear layer but the output head; None: they stay plain.
    head: the format of the output head; None: it stays plain. A function returns it for a device.
    """

    def __init__(
        self,
        scheme: Scheme | None = None,
        head: Scheme | Callable[[torch.device], Scheme | None] | None = None,
    ) -> None:
        self.scheme, self.head = scheme, head

    def wanted(self, name: str, device: torch.device) -> Scheme | None:
        """Return the format for the plain layer `name`, whose weight is on `device`; None: it stays plain."""
        if name != HEAD:
            return self.scheme
        return self.head(device) if callable(self.head) else self.head

    def reading(self) -> Quantize:
        """Return a loader that reads quantized checkpoints as this one does, and quantizes nothing itself."""
        return type(self)()

    def expect(self, model: Model) -> None:
        """Replace modules of a model on `meta` whose matrices the checkpoint has in a GGUF format.

        Raises:
            UserError: the checkpoint is quantized in another format, or is to be quantized again.
        """
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
        """Store a checkpoint's tensor at `name` in `model`; a weight is quantized first, and then freed."""
        owner, _, leaf = name.rpartition(".")
        scheme = self.wanted(owner, tensor.device)
        layer = model.get_submodule(owner)
        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):
            assign(model, name, tensor)
            return
        # The bias is on `meta` until it is placed in its turn.
        model.set_submodule(owner, QuantLinear(quantized(tensor, scheme, owner), layer.bias))

    def finish(self, model: Model) -> Model:
        """Tie heads to their embeddings after all tensors are loaded, and return the model."""
        for head, embedding in tied_blocks(model):
            model.set_submodule(head, BlockLinear.tied(embedding))
        for name in plain_layers(model):
            layer = model.get_submodule(name)
            scheme = self.wanted(name, model.device)
            if scheme is not None and isinstance(layer, nn.Linear):
                model.set_submodule(name, QuantLinear.of(layer, scheme, name))
        return model

    def changes(self, model: Model) -> bool:
        """Return True if this loader would quantize a plain layer of a model that was loaded before."""
        return any(self.wanted(name, model.device) is not None for name in plain_layers(model))


def plain_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's `nn.Linear` layers; a list of the layers would keep them in memory."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
