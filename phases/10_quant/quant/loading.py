"""Linear layers become quantized while a model is loaded: one at a time, so that two copies never exist."""

from __future__ import annotations

from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import assign
from common.models.fields import shown
from forward.model import Model
from quant.formats import Scheme
from quant.linear import QuantLinear, quantized

HEAD = "lm_head"


class Quantize:
    """Phase 01's `Linears`: what a checkpoint has in few bits stays so, and the rest may be made so.

    scheme: of every linear layer but the head; None: they stay as they are.
    head: of the head; None: it stays as it is.
    """

    def __init__(self, scheme: Scheme | None = None, head: Scheme | None = None) -> None:
        self.scheme, self.head = scheme, head

    def wanted(self, name: str) -> Scheme | None:
        """What is to be made of the plain layer `name`."""
        return self.head if name == HEAD else self.scheme

    def expect(self, model: Model) -> None:
        """See `Linears.expect`."""
        if model.config.quantization is not None:
            method = shown(model.config.quantization["quant_method"])
            raise UserError(f"quantization_config names the method {method}, which is not supported")

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `Linears.place`: a weight that is to be quantized is so at once, and then let go of."""
        owner, _, leaf = name.rpartition(".")
        scheme = self.wanted(owner)
        layer = model.get_submodule(owner)
        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):
            assign(model, name, tensor)
            return
        # The bias is on `meta` until it is placed in its turn.
        _replace(model, owner, QuantLinear(quantized(tensor, scheme, owner), layer.bias))

    def finish(self, model: Model) -> Model:
        """See `Linears.finish`."""
        for name in self._plain(model):
            scheme, layer = self.wanted(name), model.get_submodule(name)
            if scheme is not None and isinstance(layer, nn.Linear):
                _replace(model, name, QuantLinear.of(layer, scheme, name))
        return model

    def changes(self, model: Model) -> bool:
        """See `Linears.changes`."""
        return any(self.wanted(name) is not None for name in self._plain(model))

    @staticmethod
    def _plain(model: Model) -> list[str]:
        """Names, not layers: a list of these would keep them all alive until the last is replaced."""
        return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, layer)
