"""Graphs and overlap as features of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, get_args

from common.options import option
from cuda_graphs.overlap import OverlappedLoop
from paged_cache import EngineBuilder, Feature
from triton_paged_attention import Backend, Kernels


@dataclass(frozen=True)
class Graphs(Feature):
    """Replay steps from CUDA graphs instead of launching their kernels one by one."""

    name = "graphs"
    phase = 9
    for_draft_models = True
    without: ClassVar[Mapping[str, str]] = {"sampling": "torch"}
    # Torch's attention chooses its calls by the lengths of the requests, which a graph cannot.
    needs = on_with = (Kernels,)
    on_device = "cuda"

    graph_rows: int = option(
        256, "requests in the largest decode step that has a graph", low=1
    )
    graph_tokens: int = option(
        1024, "tokens in the largest mixed step that has a graph; 0: none has", low=0
    )
    sampling: Backend = option(
        "triton", "the choice of tokens: by a kernel, or by torch", choices=get_args(Backend)
    )

    def install(self, builder: EngineBuilder) -> None:
        """Replace the engine's runner by `GraphRunner`, and add its CUDA graphs for decodes and for prompts.

        Also replace the choice of tokens by Triton kernels, unless `sampling` is "torch", and reserve
        memory for the graphs.
        """
        from cuda_graphs.executors import ChunkGraphExecutor, DecodeGraphExecutor
        from cuda_graphs.memory import graph_bytes
        from cuda_graphs.runner import GraphRunner
        from cuda_graphs.sampling import TritonSamplerBackend

        builder.runner.replace(self, GraphRunner)
        if self.sampling == "triton":
            builder.sampler_backend.replace(self, TritonSamplerBackend())

        def chunks(runner: GraphRunner) -> ChunkGraphExecutor:
            return ChunkGraphExecutor(
                runner, most_tokens=self.graph_tokens, step_tokens=builder.step_tokens
            )

        builder.executors[ChunkGraphExecutor] = chunks
        builder.executors[DecodeGraphExecutor] = partial(
            DecodeGraphExecutor, most_rows=self.graph_rows
        )
        builder.reservations.append(
            lambda builder: graph_bytes(
                builder.model,
                min(self.graph_rows, builder.max_rows),
                self.graph_tokens,
                builder.step_tokens,
            )
        )


@dataclass(frozen=True)
class Overlap(Feature):
    """Schedule each step while the device computes the one before."""

    name = "overlap"
    phase = 9

    def install(self, builder: EngineBuilder) -> None:
        """Replace the engine's loop by one that launches a step before it reads the last one's tokens."""
        builder.loop.replace(self, OverlappedLoop(builder.prefetchers))
