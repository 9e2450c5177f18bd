"""Masks on a GPU as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from common.errors import UserError
from cuda_graphs.feature import Graphs
from paged_cache import EngineBuilder, Feature, PagedEngine
from phases.appendix.guidance.loop import EarlyMaskLoop
from structured.loop import EarlyGrammarManager
from structured.masks import AutomataGrammarManager


@dataclass(frozen=True)
class MaskedGraphs(Feature):
    """Masks are applied by a kernel, and with graphs the second half of a masked step is one."""

    name: ClassVar[str] = "masked_graphs"
    phase: ClassVar[int] = 12

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """Tell whether there are kernels, and grammars."""
        return others.get("structured") is not None and others.get("kernels") is not None

    def install(self, builder: EngineBuilder) -> None:
        """Bring a sampler, a plan, and a loop that sends what the next step reads while masks are made."""
        if (
            not isinstance(builder.masks, AutomataGrammarManager)
            or "kernels" not in builder.features
        ):
            raise UserError("masked_graphs is on, but kernels or structured is off")
        from phases.appendix.masked_graphs.kernel import with_kernel

        builder.decorate(self, sampler_backend=with_kernel)
        graphs = builder.features.get("graphs")
        if not isinstance(graphs, Graphs):
            return
        from phases.appendix.masked_graphs.graphs import MaskedGraphExecutor, masked_bytes

        builder.plans["masked"] = MaskedGraphExecutor
        most = graphs.graph_rows
        builder.reserve.append(
            lambda whole: masked_bytes(whole.model, min(most, whole.size("max_rows")))
        )
        if "overlap" in builder.features:
            builder.loops["overlap"] = staging_halves


def staging_halves(engine: PagedEngine) -> EarlyMaskLoop:
    """Make the loop of an engine whose steps overlap; over ranks masked steps have no graphs."""
    from cuda_graphs.runner import GraphRunner
    from phases.appendix.masked_graphs.graphs import MaskedGraphExecutor

    assert isinstance(engine.runner, GraphRunner)
    plan = next(
        (plan for plan in engine.runner.plans if isinstance(plan, MaskedGraphExecutor)), None
    )
    masks = cast(EarlyGrammarManager, engine.masks)
    return EarlyMaskLoop(masks) if plan is None else EarlyMaskLoop(masks, plan.stage)
