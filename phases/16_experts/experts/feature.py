"""Mixture of experts as a feature (option) of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from experts.grouped_experts import GroupedExperts, group_experts
from experts.layer import Experts
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from quant.linear import QuantLinear
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class MixtureOfExperts(Feature):
    """Put each layer's experts in two tensors, and compute each expert's tokens together."""

    name = "experts"
    phase = 16

    def configure_load(self, builder: EngineBuilder) -> None:
        """Let `builder` group the experts of each layer in two tensors when the model is loaded."""
        builder.surgeries.append(self._group)

    def _group(self, builder: EngineBuilder) -> None:
        """Put the experts of each layer of the builder's model in two tensors, in place.

        One layer is done after the other, so that no more than one layer is in memory twice. Experts of eight
        bits are grouped only if Triton kernels are on, which read them. Experts in other quantized formats
        stay modules.
        """
        if not any(expert_layers(builder.model)):
            return
        kernels = builder.feature(Kernels) is not None
        model = builder.own_model()
        for layer in expert_layers(model):
            quantized = any(isinstance(part, QuantLinear) for part in layer.experts.modules())
            if kernels or not quantized:
                layer.experts = group_experts(layer.experts, model.config.activation)

    def install(self, builder: EngineBuilder) -> None:
        """Give the layers of experts of `builder`'s model Triton kernels, if phase 06's kernels are on."""
        if builder.feature(Kernels) is None or not any(expert_layers(builder.model)):
            return
        from experts.kernels.grouped import grouped, scratch_bytes
        from experts.kernels.routing import route_at_once  # Triton comes with it
        from experts.kernels.small_batch import SMALL_BATCH, gathered

        for layer in expert_layers(builder.own_model()):
            assert isinstance(layer.experts, GroupedExperts)
            layer.experts.kernels = (SMALL_BATCH, gathered, grouped)
            layer.route = route_at_once
            room = partial(
                scratch_bytes,
                layer.experts.down,
                layer.facts.top_k,
                builder.model.dtype.itemsize,
            )
        builder.reservations.append(lambda builder: room(builder.step_tokens))


def expert_layers(model: Model) -> Iterator[Experts]:
    """Return an iterator over the model's layers of experts (`Experts`), from the first to the last."""
    return (layer for layer in model.modules() if isinstance(layer, Experts))
