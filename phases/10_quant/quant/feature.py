"""Quantization as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.options import option
from forward.loading import WeightLoader
from paged_cache import EngineBuilder, Feature
from paged_cache.pool import KVFormat
from quant import cpu
from quant.formats import INT4, SCHEMES, Scheme
from quant.kv import KV_DTYPES, head_scales, sample
from quant.linear import QuantLinear
from quant.loading import Quantize
from triton_paged_attention import Kernels

AUTO, PLAIN = "auto", "none"


def head_for(scheme: str, device: torch.device) -> str:
    """Return the name of the output head's format, such as "fp8", if the layers have the format `scheme`.

    It is the layers' own format, except for int4: of all layers the head loses most by four bits, so it
    gets eight. On a GPU that multiplies e4m3 numbers that is fp8, which needs no unpacking, otherwise int8.
    """
    if scheme != "int4":
        return scheme
    if device.type != "cuda":
        return "int8"
    from quant.products import hardware_rounds  # Triton comes with it

    return "fp8" if hardware_rounds(device) else "int8"


@dataclass(frozen=True)
class Quant(Feature):
    """Quantize weights, keys and values to 8 or 4 bits."""

    name = "quant"
    phase = 10

    quantization: str | None = option(
        None,
        f"make the weights {', '.join(SCHEMES)} while loading; none: leave them, also on a CPU where "
        "commands take the blocks of a GGUF file by default; a quantized checkpoint needs nothing",
        choices=[PLAIN, *SCHEMES],
    )
    group_size: int = option(
        128, "inputs that share a scale in int4, less where that does not divide them"
    )
    head: str = option(
        AUTO,
        "the head's weights: auto, none (they stay as they are), or as quantization",
        choices=[AUTO, PLAIN, *SCHEMES],
    )
    kv_cache: str = option(
        PLAIN,
        "keys and values: fp8, int8, or none (they stay as they are)",
        choices=[PLAIN, *KV_DTYPES],
    )

    def __post_init__(self) -> None:
        """Check the options; raise `UserError` for a format that does not exist or does not fit another."""
        super().__post_init__()
        INT4.with_group(self.group_size)

    def configure_load(self, builder: EngineBuilder) -> None:
        """Replace the builder's weight loader by one that quantizes layers while the model is loaded.

        If the KV cache is quantized, also let its scales be measured once the model is loaded.
        """
        builder.weight_loader.replace(self, self.weight_loader())
        if self.kv_cache != PLAIN:
            builder.surgeries.append(self._scale_keys)

    def weight_loader(self) -> WeightLoader:
        """Return the loader that quantizes linear layers as these options say."""
        layers = self._scheme(self.quantization)
        if self.head == AUTO and layers is not None:
            name = layers.name
            return Quantize(layers, lambda device: self._scheme(head_for(name, device)))
        return Quantize(
            layers, self._scheme(None if self.head in (AUTO, PLAIN) else self.head)
        )

    def _scheme(self, name: str | None) -> Scheme | None:
        if name in (None, PLAIN):
            return None
        scheme = SCHEMES[name]
        return scheme.with_group(self.group_size) if scheme.scales == "group" else scheme

    def _scale_keys(self, builder: EngineBuilder) -> None:
        """Set the KV cache's dtype and scales, measured by running the model on sample tokens.

        This must come before layers are replaced by those that need a KV cache, for the model runs without
        one.
        """
        scales = head_scales(builder.model, [sample(builder.model)], self.kv_cache)
        builder.kv.replace(self, KVFormat(KV_DTYPES[self.kv_cache], scales))

    def install(self, builder: EngineBuilder) -> None:
        """Replace the model's quantized linear layers by those with the device's fastest matrix product.

        With Triton kernels, also reserve memory for the largest weight that is unpacked at a call.
        """
        if not any(isinstance(layer, QuantLinear) for layer in builder.model.modules()):
            return
        if builder.feature(Kernels) is not None:
            from quant.kernel_layers import install, unpacked_bytes  # Triton comes with it

            install(builder.own_model())
            builder.reservations.append(lambda builder: unpacked_bytes(builder.model))
        elif builder.model.device.type == "cpu":
            cpu.install(builder.own_model())
