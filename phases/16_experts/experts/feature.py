"""Mixture of experts as a feature of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from common.errors import UserError, integer
from common.options import option
from experts import cut
from experts.stacked import StackedExperts, Stacking
from forward.model import Model
from paged_cache import Feature, Parts
from quant.loading import Quantize

TEXT = Path(__file__).parents[3] / "benchmarks" / "texts" / "news_from_nowhere.txt"
"""What a dense model is looked at with when its MLPs are cut."""


@dataclass(frozen=True)
class MixtureOfExperts(Feature):
    """Each layer's experts lie in two stacks, and a step computes the tokens of each together."""

    name: ClassVar[str] = "experts"
    phase: ClassVar[int] = 16

    active_experts: int | None = option(
        None, f"experts a token goes through; a dense model's MLPs are cut in {cut.COUNT} for it"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        if self.active_experts is not None:
            integer("active_experts", self.active_experts, low=1)

    def prepare(self, parts: Parts) -> None:
        """Stack the experts while the model is loaded."""
        kernels = any(feature.name == "kernels" for feature in parts.recipe.features)
        parts.wrap(self, linears=lambda inner: Stacking(inner or Quantize(), eight=kernels))
        if self.active_experts is not None:
            parts.stages.get("load", []).append(self._choose)  # ranks of phase 14 go through it themselves

    def _choose(self, parts: Parts) -> None:
        """Let a token go through another number of experts than the model says, or than it has."""
        model, count = parts.own_model(), self.active_experts
        facts = model.config.experts
        most = cut.COUNT if facts is None else facts.count
        if count is None or count > most:
            raise UserError(f"active_experts is {count}, but a layer has {most}")
        if facts is None:
            cut.cut(model, _text(parts), count)
            Stacking(Quantize()).finish(model)
        else:
            facts = replace(facts, top_k=count)
            model.config = replace(model.config, experts=facts)
            for layer in _layers(model):
                layer.facts = facts

    def install(self, parts: Parts) -> None:
        """Give the layers the kernels' ways, where there are kernels."""
        if "kernels" not in parts.features or not any(_layers(parts.model)):
            return
        from experts.kernels.choosing import route_at_once  # Triton comes with it
        from experts.kernels.few import GatheredWay
        from experts.kernels.grouped import GroupedWay, scratch_bytes

        for layer in _layers(parts.own_model()):
            about = layer.gate_up, layer.down, layer.act
            layer.ways, layer.route = [GatheredWay(*about), GroupedWay(*about)], route_at_once
        last, size = layer, parts.model.dtype.itemsize
        parts.reserve.append(
            lambda whole: scratch_bytes(last.down, whole.size("step_tokens"), last.facts.top_k, size)
        )


def _layers(model: Model) -> Iterator[StackedExperts]:
    return (layer for layer in model.modules() if isinstance(layer, StackedExperts))


def _text(parts: Parts) -> list[int]:
    """Return the tokens of `TEXT`; those of a model without a tokenizer are random."""
    tokenizer = parts.recipe.tokenizer
    if tokenizer is not None:
        return tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(0)
    count = cut.PIECES * cut.LENGTH
    return torch.randint(parts.model.config.vocab_size, (count,), generator=generator).tolist()
