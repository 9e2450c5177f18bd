"""Mixture of experts as a feature of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from common.errors import UserError, integer
from common.options import option
from experts import cut
from experts.layer import ExpertList, Experts
from experts.stacked import StackedExperts
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from quant.calibrate import TEXT
from quant.linear import QuantLinear


@dataclass(frozen=True)
class MixtureOfExperts(Feature):
    """Each layer's experts lie in two stacks, and a step computes the tokens of each together."""

    name: ClassVar[str] = "experts"
    phase: ClassVar[int] = 16

    active_experts: int | None = option(
        None,
        f"experts a token goes through; a dense model's MLPs are cut in {cut.COUNT} for it",
    )

    def __post_init__(self) -> None:
        """Check the options."""
        if self.active_experts is not None:
            integer("active_experts", self.active_experts, low=1)

    def prepare(self, builder: EngineBuilder) -> None:
        """Stack the experts when the model is loaded."""
        loading = builder.stages.get("load", [])  # ranks of phase 14 go through it themselves
        loading.append(self._stack)
        if self.active_experts is not None:
            loading.append(self._choose)

    def _stack(self, builder: EngineBuilder) -> None:
        """Put experts into stacks, a layer at a time: no more than one layer's weights are there twice.

        Those of eight bits are for kernels, which read them. Otherwise experts of few bits stay one by one.
        """
        if not any(expert_layers(builder.model)):
            return
        kernels = any(feature.name == "kernels" for feature in builder.recipe.features)
        for layer in expert_layers(builder.own_model()):
            few_bits = any(isinstance(part, QuantLinear) for part in layer.experts.modules())
            if isinstance(layer.experts, ExpertList) and (kernels or not few_bits):
                layer.experts = StackedExperts(
                    *layer.experts.stacks(builder.model.config.activation)
                )

    def _choose(self, builder: EngineBuilder) -> None:
        """Let a token go through another number of experts than the model says, or than it has."""
        model, count = builder.own_model(), self.active_experts
        facts = model.config.experts
        most = cut.COUNT if facts is None else facts.count
        if count is None or count > most:
            raise UserError(f"active_experts is {count}, but a layer has {most}")
        if facts is None:
            cut.cut(model, _text(builder), count)
        else:
            model.config = replace(model.config, experts=replace(facts, top_k=count))
            for layer in expert_layers(model):
                layer.facts = replace(facts, top_k=count)

    def install(self, builder: EngineBuilder) -> None:
        """Give the layers the kernels' ways, where there are kernels."""
        if "kernels" not in builder.features or not any(expert_layers(builder.model)):
            return
        from experts.kernels.grouped import grouped, scratch_bytes
        from experts.kernels.routing import route_at_once  # Triton comes with it
        from experts.kernels.small_batch import SMALL_BATCH, gathered

        for layer in expert_layers(builder.own_model()):
            assert isinstance(layer.experts, StackedExperts)
            layer.experts.kernels = (SMALL_BATCH, gathered, grouped)
            layer.route = route_at_once
            room = partial(
                scratch_bytes,
                layer.experts.down,
                layer.facts.top_k,
                builder.model.dtype.itemsize,
            )
        builder.reserve.append(lambda whole: room(whole.size("step_tokens")))


def expert_layers(model: Model) -> Iterator[Experts]:
    """Return the layers of experts, from the first to the last."""
    return (layer for layer in model.modules() if isinstance(layer, Experts))


def _text(builder: EngineBuilder) -> list[int]:
    """Return the tokens of the calibration text, by which a dense model's MLPs are cut.

    A model without a tokenizer gets all of its own tokens.
    """
    tokenizer, most = builder.recipe.tokenizer, builder.model.config.vocab_size
    if tokenizer is None:
        return [number * 7919 % most for number in range(cut.PIECES * cut.LENGTH)]
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"))
