"""Sampling under grammar masks by a kernel and by CUDA graphs, as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature
from structured import Structured
from triton_paged_attention import Kernels

if TYPE_CHECKING:
    from cuda_graphs.runner import GraphRunner


@dataclass(frozen=True)
class MaskedGraphs(Feature):
    """Apply grammar masks by a kernel, and sample masked steps by CUDA graphs if graphs are on."""

    name = "masked_graphs"
    phase = 12
    needs = on_with = (Structured, Kernels)

    def install(self, builder: EngineBuilder) -> None:
        """Let a kernel apply grammar masks; with CUDA graphs on, let these sample steps that have masks."""
        from phases.appendix.masked_graphs.kernel import Forbids, with_kernel

        builder.sampler_backend.decorate(self, with_kernel)
        graphs = builder.feature(Graphs)
        if graphs is None:
            return
        from phases.appendix.masked_graphs.graphs import MaskedGraphExecutor, masked_bytes

        made: list[MaskedGraphExecutor] = []

        def executor(runner: GraphRunner) -> MaskedGraphExecutor | None:
            if isinstance(runner.sampler.sampler_backend, Forbids):
                made.append(MaskedGraphExecutor(runner))
                return made[0]
            return (
                None  # over ranks: rank 0 tells the others which masked tokens it has chosen
            )

        builder.executors[MaskedGraphExecutor] = executor
        builder.reservations.append(
            lambda builder: masked_bytes(
                builder.model, min(graphs.graph_rows, builder.max_rows)
            )
        )
        builder.prefetchers.append(lambda works: made and made[0].stage(works))
