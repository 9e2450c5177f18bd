"""The suffix drafter as a feature of an engine: `drafter="suffix"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import integer
from common.options import option
from paged_cache import Feature, Parts
from phases.appendix.suffix_drafter.automaton import Suffixes
from speculative import Speculate, Speculator
from speculative.feature import DRAFTERS, DrafterKind

MOST_BYTES = 64 << 20
"""Memory for the shared automata, unless the caller says otherwise."""


@dataclass(frozen=True)
class SuffixDrafter(Feature):
    """Drafts are what followed the longest end of the text that stood anywhere before."""

    name: ClassVar[str] = "suffix_drafter"
    phase: ClassVar[int] = 11

    suffix_bytes: int = option(MOST_BYTES, "memory on the host for what suffix shares over requests")

    def __post_init__(self) -> None:
        """Check the option."""
        integer("suffix_bytes", self.suffix_bytes, low=0, high=1 << 36)

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On where it was asked for."""
        speculate = others.get("speculate")
        return isinstance(speculate, Speculate) and speculate.drafter == "suffix"

    def install(self, parts: Parts) -> None:
        """Tell the source how much memory it has."""
        drafter = parts.drafter
        if isinstance(drafter, Speculator) and isinstance(drafter.source, Suffixes):
            drafter.source.limit(self.suffix_bytes)


DRAFTERS["suffix"] = DrafterKind(7, lambda options, parts: Suffixes(MOST_BYTES))
