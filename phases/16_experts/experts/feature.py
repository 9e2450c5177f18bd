"""Mixture of experts as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experts.stacked import Stacking
from forward.loading import Linears
from paged_cache import Feature, Parts
from quant.loading import Quantize


@dataclass(frozen=True)
class MixtureOfExperts(Feature):
    """Each layer's experts lie in two tensors, and a step computes the tokens of each together."""

    name: ClassVar[str] = "experts"
    phase: ClassVar[int] = 16

    def prepare(self, parts: Parts) -> None:
        """Stack the experts while the model is loaded."""
        parts.wrap(self, linears=_stack)

    def install(self, parts: Parts) -> None:
        """Give the layers the fastest ways that there are on this device."""


def _stack(inner: Linears | None) -> Linears:
    return Stacking(Quantize() if inner is None else inner)
