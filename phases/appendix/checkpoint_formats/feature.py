"""Read a checkpoint that is quantized already, while a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from common.errors import UserError
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from phases.appendix.checkpoint_formats.configs import stored
from phases.appendix.checkpoint_formats.layouts import StoredLinear
from quant import Quant
from quant.blocks import METHOD
from quant.loading import Quantize, plain_layers


class ReadFormats(Quantize):
    """A weight loader that keeps the layers which the checkpoint stores quantized, and may quantize the
    others.
    """

    def expect(self, model: Model) -> None:
        """Replace modules of a model on the `meta` device, so that it has the checkpoint's quantized
        tensors.
        """
        stored_as = model.config.quantization
        if stored_as is None or stored_as["quant_method"] == METHOD:
            super().expect(model)
            return
        if self.scheme is not None:
            raise UserError(
                f"quantization is {self.scheme.name!r}, but the checkpoint is quantized already: leave it out"
            )
        if model.config.family == "gpt2":
            raise UserError(
                "quantization_config: GPT-2's matrices lie the other way: it is not supported"
            )
        plan = stored(stored_as)
        for name in plain_layers(model):
            layer, layout = model.get_submodule(name), plan.layout(name)
            if layout is not None and isinstance(layer, nn.Linear):
                model.set_submodule(name, StoredLinear(layer, layout, name))

    def finish(self, model: Model) -> Model:
        """Turn the tensors that were loaded into quantized layers; return the same model."""
        for name in [
            name for name, layer in model.named_modules() if isinstance(layer, StoredLinear)
        ]:
            layer = model.get_submodule(name)
            assert isinstance(layer, StoredLinear)
            model.set_submodule(name, layer.understood(name))
        return super().finish(model)


@dataclass(frozen=True)
class CheckpointFormats(Feature):
    """Checkpoints in AWQ's, GPTQ's, FP8's and compressed-tensors' formats load as they are."""

    name = "checkpoint_formats"
    phase = 10
    needs = on_with = (Quant,)

    def configure_load(self, builder: EngineBuilder) -> None:
        """Set a weight loader that reads the checkpoint's quantized layers, if there are any; else do
        nothing.

        Other layers follow the option of phase 10 that quantizes weights.
        """
        plain = builder.weight_loader.part
        assert isinstance(plain, Quantize)
        read = ReadFormats(plain.scheme, plain.head)
        builder.weight_loader.decorate(self, lambda plain: read)
