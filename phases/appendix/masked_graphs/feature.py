"""Masks on a GPU as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch

from common.errors import UserError
from cuda_graphs.feature import Graphs
from paged_cache import Feature, PagedEngine, Parts
from phases.appendix.guidance.loop import EarlyHalves
from structured.loop import EarlyMasks
from structured.masks import GrammarMasks


@dataclass(frozen=True)
class MaskedGraphs(Feature):
    """Masks are applied by a kernel, and with graphs the second half of a masked step is one."""

    name: ClassVar[str] = "masked_graphs"
    phase: ClassVar[int] = 12

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """Tell whether there are kernels, and grammars."""
        return others.get("structured") is not None and others.get("kernels") is not None

    def install(self, parts: Parts) -> None:
        """Bring a sampler, a plan, and a loop that sends what the next step reads while masks are made."""
        if not isinstance(parts.masks, GrammarMasks) or "kernels" not in parts.features:
            raise UserError("masked_graphs is on, but kernels or structured is off")
        from phases.appendix.masked_graphs.kernel import with_kernel

        parts.wrap(self, chooser=with_kernel)
        graphs = parts.features.get("graphs")
        if not isinstance(graphs, Graphs):
            return
        from phases.appendix.masked_graphs.graphs import MaskedPlan, masked_bytes

        parts.plans["masked"] = MaskedPlan
        most = graphs.graph_rows
        parts.reserve.append(lambda whole: masked_bytes(whole.model, min(most, whole.size("max_rows"))))
        if "overlap" in parts.features:
            parts.loops["overlap"] = staging_halves


def staging_halves(engine: PagedEngine) -> EarlyHalves:
    """Make the loop of an engine whose steps overlap; over ranks masked steps have no graphs."""
    from cuda_graphs.runner import GraphRunner
    from phases.appendix.masked_graphs.graphs import MaskedPlan

    assert isinstance(engine.runner, GraphRunner)
    plan = next((plan for plan in engine.runner.plans if isinstance(plan, MaskedPlan)), None)
    masks = cast(EarlyMasks, engine.masks)
    return EarlyHalves(masks) if plan is None else EarlyHalves(masks, plan.stage)
