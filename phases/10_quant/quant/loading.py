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
    """A `WeightLoader` that loads a checkpoint and quantizes linear layers as their weights arrive.

    scheme: the format of every linear layer but the output head; None: these are not quantized.
    head: the format of the output head, or a function that returns it for a device; None: it is not
        quantized.
    """

    def __init__(
        self,
        scheme: Scheme | None = None,
        head: Scheme | Callable[[torch.device], Scheme | None] | None = None,
    ) -> None:
        self.scheme, self.head = scheme, head

    def wanted(self, name: str, device: torch.device) -> Scheme | None:
        """Return the format to which the `nn.Linear` called `name` is to be quantized; None: it is not.

        device: where its weight is.
        """
        if name != HEAD:
            return self.scheme
        return self.head(device) if callable(self.head) else self.head

    def reading(self) -> Quantize:
        """Return a loader of the same class that quantizes nothing, and only reads quantized checkpoints."""
        return type(self)()

    def expect(self, model: Model) -> None:
        """Replace modules of a model on `meta` by those for the GGUF formats of its checkpoint.

        A model whose checkpoint is not quantized stays as it is.

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
        """Store a checkpoint's tensor in `model`; the weight of a linear layer is quantized first.

        name: of the parameter to store it in, such as "lm_head.weight". A quantized layer does not keep
            `tensor`.
        """
        owner, _, leaf = name.rpartition(".")
        scheme = self.wanted(owner, tensor.device)
        layer = model.get_submodule(owner)
        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):
            assign(model, name, tensor)
            return
        # The bias is on `meta` until it is placed in its turn.
        model.set_submodule(owner, QuantLinear(quantized(tensor, scheme, owner), layer.bias))

    def finish(self, model: Model) -> Model:
        """Finish a model whose tensors are loaded, and return it.

        Output heads that are tied to a GGUF embedding get its tensors, and layers that `place` has not
        quantized (such as other tied heads) are quantized.
        """
        for head, embedding in tied_blocks(model):
            model.set_submodule(head, BlockLinear.tied(embedding))
        for name in plain_layers(model):
            layer = model.get_submodule(name)
            scheme = self.wanted(name, model.device)
            if scheme is not None and isinstance(layer, nn.Linear):
                model.set_submodule(name, QuantLinear.of(layer, scheme, name))
        return model

    def changes(self, model: Model) -> bool:
        """Return True if this loader would quantize a layer of `model`, which is loaded already."""
        return any(self.wanted(name, model.device) is not None for name in plain_layers(model))


def plain_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's `nn.Linear` layers; a list of the layers would keep them in memory."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
