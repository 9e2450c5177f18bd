"""Drafting inside CUDA graphs as a feature of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from cuda_graphs import Graphs, Overlap, OverlappedLoop
from paged_cache import EngineBuilder, Feature, find
from phases.appendix.latency.feature import Latency
from speculative import Speculate, SpeculativeRunner
from speculative.draft_model import DraftModel
from speculative.head import HeadSource
from speculative.ngram import NGrams


@dataclass(frozen=True)
class GraphDrafting(Feature):
    """A head and n-grams draft inside graphs, and up to eight tokens are the columns of a tensor core."""

    name: ClassVar[str] = "draft_ahead"
    phase: ClassVar[int] = 11

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Inside graphs, where there is guessing."""
        return find(others, Graphs) is not None and find(others, Speculate) is not None

    def install(self, builder: EngineBuilder) -> None:
        """Install layers for up to eight tokens, and graphs of whole steps; nothing without graphs."""
        speculate, runner = builder.feature(Speculate), builder.drafter.part
        if builder.feature(Graphs) is None or not isinstance(runner, SpeculativeRunner):
            return
        assert speculate is not None
        source = runner.source
        small = source.engine if isinstance(source, DraftModel) else None
        if builder.feature(Latency) is not None:
            from phases.appendix.drafting_in_graphs.columns import install

            install(builder.own_model())
            if small is not None:
                install(small.runner.model, fewest=1)
        if not isinstance(source, (HeadSource, NGrams)) or builder.feature(Overlap) is None:
            return
        # Parts of a model add up over ranks, and states go back on the host: neither is in a graph.
        if builder.load.owner or builder.model.config.delta is not None:
            return
        from phases.appendix.drafting_in_graphs.loop import (
            GraphDrafter,
            GraphDraftingLoop,
            drafting_graph_bytes,
        )

        length, models = speculate.length, 2 if isinstance(source, HeadSource) else 1
        drafter = GraphDrafter(runner, length)
        builder.drafter.decorate(self, lambda plain: drafter)
        loop = builder.loop.part
        assert isinstance(loop, OverlappedLoop)
        builder.loop.decorate(self, lambda inner: GraphDraftingLoop(loop, drafter))
        builder.reservations.append(
            lambda builder: drafting_graph_bytes(
                builder.model, builder.max_rows, length, models=models
            )
        )
