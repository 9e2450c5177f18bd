"""Drafting inside CUDA graphs as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from paged_cache import EngineBuilder, Feature
from speculative import Speculate, SpeculativeRunner
from speculative.draft_model import DraftModel
from speculative.head import HeadSource
from speculative.ngram import NGrams


@dataclass(frozen=True)
class GraphDrafting(Feature):
    """A head and n-grams draft inside graphs, and a few tokens are the columns of a tensor core."""

    name: ClassVar[str] = "draft_ahead"
    phase: ClassVar[int] = 11

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """Inside graphs, where there is guessing."""
        return others.get("graphs") is not None and others.get("speculate") is not None

    def install(self, builder: EngineBuilder) -> None:
        """Layers for a few tokens, and graphs of whole steps. Nothing without graphs."""
        speculate, speculator = builder.features.get("speculate"), builder.drafter
        if "graphs" not in builder.features or not isinstance(speculator, SpeculativeRunner):
            return
        assert isinstance(speculate, Speculate)
        source = speculator.source
        small = source.engine if isinstance(source, DraftModel) else None
        if "latency" in builder.features:
            from phases.appendix.drafting_in_graphs.columns import install

            install(builder.own_model())
            if small is not None:
                install(small.runner.model, fewest=1)
        if not (
            isinstance(source, (HeadSource, NGrams))
            and "overlap" in builder.features
            and speculate.whole
        ):
            return
        from phases.appendix.drafting_in_graphs.loop import (
            GraphDrafter,
            GraphDraftingLoop,
            drafting_graph_bytes,
        )

        length, models = speculate.length, 2 if isinstance(source, HeadSource) else 1
        ahead = GraphDrafter(speculator, length)
        builder.decorate(self, drafter=lambda plain: ahead)
        builder.loops["in graph"] = lambda engine: GraphDraftingLoop(engine, ahead)
        builder.reserve.append(
            lambda whole: drafting_graph_bytes(
                whole.model, whole.size("max_rows"), length, models=models
            )
        )
