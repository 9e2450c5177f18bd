"""Mixture of experts as a feature of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from common.errors import UserError, integer
from common.options import option
from experts.grouped_experts import GroupedExperts, group_experts
from experts.layer import Experts
from forward.loading import facts_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from quant.linear import QuantLinear
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class MixtureOfExperts(Feature):
    """Put each layer's experts in two tensors, and compute each expert's tokens together."""

    name = "experts"
    phase = 16

    active_experts: int | None = option(
        None, "experts that a token goes through, instead of as many as the model says"
    )

    def __post_init__(self) -> None:
        """Check the options; raise `UserError` for a value out of range."""
        if self.active_experts is not None:
            integer("active_experts", self.active_experts, low=1)

    def configure_load(self, builder: EngineBuilder) -> None:
        """Let `builder` group the experts of each layer in two tensors when the model is loaded.

        Raises:
            UserError: the options ask for more experts than a layer has.
        """
        count = self.active_experts
        facts = facts_of(builder.recipe.model).experts if count is not None else None
        if count is not None and (facts is None or count > facts.count):
            has = "the model has no experts" if facts is None else f"a layer has {facts.count}"
            raise UserError(f"active_experts is {count}, but {has}")
        builder.surgeries.append(self._group)

    def _group(self, builder: EngineBuilder) -> None:
        """Group each layer's experts of the builder's model, in place, layer by layer, so that only one is in
        memory twice.

        Experts of eight bits are grouped only for kernels, which read them. Other quantized ones stay
        modules.
        """
        if not any(expert_layers(builder.model)):
            return
        kernels = builder.feature(Kernels) is not None
        model = builder.own_model()
        if self.active_experts is not None:
            assert model.config.experts is not None
            facts = replace(model.config.experts, top_k=self.active_experts)
            model.config = replace(model.config, experts=facts)
        for layer in expert_layers(model):
            assert model.config.experts is not None
            layer.facts = model.config.experts
            quantized = any(isinstance(part, QuantLinear) for part in layer.experts.modules())
            if kernels or not quantized:
                layer.experts = group_experts(layer.experts, model.config.activation)

    def install(self, builder: EngineBuilder) -> None:
        """Give the model's layers of experts Triton kernels, if phase 06's kernels are on."""
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
    """Return an iterator over the model's layers of experts, from the first to the last."""
    return (layer for layer in model.modules() if isinstance(layer, Experts))
