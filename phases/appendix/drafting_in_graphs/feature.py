"""Drafting inside CUDA graphs as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from paged_cache import Feature, Parts
from speculative import Speculate, Speculator
from speculative.draft_model import DraftModel
from speculative.head import HeadSource
from speculative.ngram import NGrams


@dataclass(frozen=True)
class DraftAhead(Feature):
    """A head and n-grams draft inside graphs, and a few tokens are the columns of a tensor core."""

    name: ClassVar[str] = "draft_ahead"
    phase: ClassVar[int] = 11

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """Inside graphs, where there is guessing."""
        return others.get("graphs") is not None and others.get("speculate") is not None

    def install(self, parts: Parts) -> None:
        """Layers for a few tokens, and graphs of whole steps. Nothing without graphs."""
        speculate, speculator = parts.features.get("speculate"), parts.drafter
        if "graphs" not in parts.features or not isinstance(speculator, Speculator):
            return
        assert isinstance(speculate, Speculate)
        source = speculator.source
        small = source.engine if isinstance(source, DraftModel) else None
        if "latency" in parts.features:
            from phases.appendix.drafting_in_graphs.columns import install

            install(parts.own_model())
            if small is not None:
                install(small.runner.model, fewest=1)
        if not (isinstance(source, (HeadSource, NGrams)) and "overlap" in parts.features and speculate.whole):
            return
        from phases.appendix.drafting_in_graphs.loop import Ahead, InGraph, ahead_bytes

        length, models = speculate.length, 2 if isinstance(source, HeadSource) else 1
        ahead = Ahead(speculator, length)
        parts.wrap(self, drafter=lambda plain: ahead)
        parts.loops["in graph"] = lambda engine: InGraph(engine, ahead)
        parts.reserve.append(
            lambda whole: ahead_bytes(whole.model, whole.size("max_rows"), length, models=models)
        )
