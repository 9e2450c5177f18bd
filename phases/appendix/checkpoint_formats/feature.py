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
    """A weight loader for checkpoints with quantized layers, which stay in the checkpoint's numbers.

    Other checkpoints are loaded as phase 10's `Quantize` does, which may quantize layers.
    """

    def expect(self, model: Model) -> None:
        """Replace the linear layers that the checkpoint stores quantized, before weights are read.

        Each becomes a `StoredLinear`, which has the checkpoint's tensors. model: on the `meta` device.

        Raises:
            UserError: the format is not supported, or the user asks for another quantization.
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
        """Replace each `StoredLinear`, now loaded, by a quantized layer; return the same model."""
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
        """Set a weight loader that keeps the layers which a checkpoint stores quantized.

        Checkpoints without such layers are quantized or not, as phase 10's option `quantization` says.
        """
        plain = builder.weight_loader.part
        assert isinstance(plain, Quantize)
        read = ReadFormats(plain.scheme, plain.head)
        builder.weight_loader.decorate(self, lambda plain: read)
