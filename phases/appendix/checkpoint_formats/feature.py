"""Read a checkpoint that is quantized already, while a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.errors import UserError
from forward.model import Model
from paged_cache import Feature, Parts
from phases.appendix.checkpoint_formats.configs import stored
from phases.appendix.checkpoint_formats.layouts import StoredLinear
from quant.kv import StoredKV
from quant.loading import Quantize, plain_layers, replace_layer
from quant.weights import check_scale

SIDES = ("k_scale", "v_scale")


class ReadFormats(Quantize):
    """`Quantize` for which what a checkpoint has in few bits stays so; the rest may be made so.

    kv: what the checkpoint keeps keys and values in, fp8 or int8; None where it says nothing.
    """

    kv: str | None = None

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
        for name in plain_layers(model):
            layer, layout = model.get_submodule(name), plan.layout(name)
            if layout is not None and isinstance(layer, nn.Linear):
                replace_layer(model, name, StoredLinear(layer, layout, name))
        if plan.kv is not None:
            self.kv = plan.kv
            for attention in _attentions(model):
                for side in SIDES:
                    attention.register_buffer(side, torch.empty(1, device="meta"))

    def finish(self, model: Model) -> Model:
        """See `Linears.finish`."""
        for name in [name for name, layer in model.named_modules() if isinstance(layer, StoredLinear)]:
            layer = model.get_submodule(name)
            assert isinstance(layer, StoredLinear)
            replace_layer(model, name, layer.understood(name))
        model = super().finish(model)
        if self.kv is not None:
            model.add_module("stored_kv", StoredKV(self.kv, _take_kv_scales(model)))
        return model


def _attentions(model: Model) -> list[nn.Module]:
    return [model.get_submodule(f"layers.{spec.index}.self_attn") for spec in model.layer_specs]


def _take_kv_scales(model: Model) -> Tensor:
    """`[L, 2, KH]` float32, and the layers are as they were before `expect`."""
    scales = []
    for index, attention in enumerate(_attentions(model)):
        for side in SIDES:
            scale, name = attention.get_buffer(side).float(), f"layers.{index}.self_attn.{side}"
            check_scale(name, scale)
            if (
                not scale.all()
            ):  # a row of zeros may have it, but what keys and values will be is not known yet
                raise UserError(f"{name} is 0, but must be above 0")
            scales.append(scale.expand(model.config.num_kv_heads))
            delattr(attention, side)
    return torch.stack(scales).view(len(model.layer_specs), len(SIDES), -1)


@dataclass(frozen=True)
class CheckpointFormats(Feature):
    """Checkpoints in AWQ's, GPTQ's, FP8's and compressed-tensors' formats load as they are."""

    name: ClassVar[str] = "checkpoint_formats"
    phase: ClassVar[int] = 10

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On with quantized layers."""
        return others.get("quant") is not None

    def prepare(self, parts: Parts) -> None:
        """Read what the checkpoint has in few bits, and leave the rest to `Quant`."""
        if not isinstance(parts.linears, Quantize):
            raise UserError("checkpoint_formats is for quant, which is off: switch it on with quant=True")
        parts.wrap(self, linears=lambda plain: ReadFormats(plain.scheme, plain.head))

    def install(self, parts: Parts) -> None:
        """Do nothing more: the layers are loaded."""
