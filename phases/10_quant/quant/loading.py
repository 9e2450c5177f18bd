"""Linear layers become quantized while a model is loaded: one at a time, so that two copies never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models.checkpoint import assign
from forward.model import Model
from quant.checkpoints import stored
from quant.formats import Scheme
from quant.kv import StoredKV, check_kv_scale
from quant.layouts import StoredLinear
from quant.linear import QuantLinear, quantized

HEAD = "lm_head"
SIDES = ("k_scale", "v_scale")


class Quantize:
    """Phase 01's `Linears`: what a checkpoint has in few bits stays so, and the rest may be made so.

    scheme: of every linear layer but the head; None: they stay as they are.
    head: of the head; None: it stays as it is. A function is asked for each device.
    """

    def __init__(
        self,
        scheme: Scheme | None = None,
        head: Scheme | Callable[[torch.device], Scheme | None] | None = None,
    ) -> None:
        self.scheme, self.head = scheme, head
        self.kv: str | None = None

    def wanted(self, name: str, device: torch.device) -> Scheme | None:
        """What is to be made of the plain layer `name`, whose weight is on `device`."""
        if name != HEAD:
            return self.scheme
        return self.head(device) if callable(self.head) else self.head

    def expect(self, model: Model) -> None:
        """See `Linears.expect`."""
        if model.config.quantization is None:
            return
        if self.scheme is not None:
            raise UserError(
                f"quantization is {self.scheme.name!r}, but the checkpoint is quantized already: leave it out"
            )
        if model.config.family == "gpt2":
            raise UserError("quantization_config: GPT-2's matrices lie the other way: it is not supported")
        plan = stored(model.config.quantization)
        for name in _plain(model):
            layer, layout = model.get_submodule(name), plan.layout(name)
            if layout is not None and isinstance(layer, nn.Linear):
                _replace(model, name, StoredLinear(layer, layout, name))
        if plan.kv is not None:
            self.kv = plan.kv
            for attention in _attentions(model):
                for side in SIDES:
                    attention.register_buffer(side, torch.empty(1, device="meta"))

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `Linears.place`: a weight that is to be quantized is so at once, and then let go of."""
        owner, _, leaf = name.rpartition(".")
        scheme = self.wanted(owner, tensor.device)
        layer = model.get_submodule(owner)
        if scheme is None or leaf != "weight" or not isinstance(layer, nn.Linear):
            assign(model, name, tensor)
            return
        # The bias is on `meta` until it is placed in its turn.
        _replace(model, owner, QuantLinear(quantized(tensor, scheme, owner), layer.bias))

    def finish(self, model: Model) -> Model:
        """See `Linears.finish`."""
        for name in [name for name, layer in model.named_modules() if isinstance(layer, StoredLinear)]:
            layer = model.get_submodule(name)
            assert isinstance(layer, StoredLinear)
            _replace(model, name, layer.understood(name, model.dtype))
        for name in _plain(model):
            layer = model.get_submodule(name)
            scheme = self.wanted(name, model.device)
            if scheme is not None and isinstance(layer, nn.Linear):
                _replace(model, name, QuantLinear.of(layer, scheme, name))
        if self.kv is not None:
            model.add_module("stored_kv", StoredKV(self.kv, _take_kv_scales(model)))
        return model

    def changes(self, model: Model) -> bool:
        """See `Linears.changes`."""
        return any(self.wanted(name, model.device) is not None for name in _plain(model))


def _attentions(model: Model) -> list[nn.Module]:
    return [model.get_submodule(f"layers.{spec.index}.self_attn") for spec in model.layer_specs]


def _take_kv_scales(model: Model) -> Tensor:
    """`[L, 2, KH]` float32, and the layers are as they were before `expect`."""
    scales = []
    for index, attention in enumerate(_attentions(model)):
        for side in SIDES:
            scale = attention.get_buffer(side).float()
            check_kv_scale(f"layers.{index}.self_attn.{side}", scale)
            scales.append(scale.expand(model.config.num_kv_heads))
            delattr(attention, side)
    return torch.stack(scales).view(len(model.layer_specs), len(SIDES), -1)


def _plain(model: Model) -> list[str]:
    """Names, not layers: a list of these would keep them all alive until the last is replaced."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, layer)
