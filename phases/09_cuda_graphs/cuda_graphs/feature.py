"""Graphs and overlap as features of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, get_args

import torch

from common.errors import UserError, choice, integer
from common.options import option
from cuda_graphs.overlap import OverlappedLoop
from paged_cache import EngineBuilder, Feature
from triton_paged_attention import Backend


@dataclass(frozen=True)
class Graphs(Feature):
    """Steps are replayed from CUDA graphs."""

    name: ClassVar[str] = "graphs"
    phase: ClassVar[int] = 9
    without: ClassVar[Mapping[str, str]] = {"sampling": "torch"}

    graph_rows: int = option(256, "requests in the largest decode step that has a graph")
    graph_tokens: int = option(
        1024, "tokens in the largest mixed step that has a graph; 0: none has"
    )
    sampling: Backend = option("triton", "the choice of tokens: by a kernel, or by torch")

    def __post_init__(self) -> None:
        """Check the options."""
        integer("graph_rows", self.graph_rows, low=1)
        integer("graph_tokens", self.graph_tokens, low=0)
        choice("sampling", self.sampling, get_args(Backend))

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """On a GPU, around attention in kernels."""
        return device.type == "cuda" and _attends(others)

    def install(self, builder: EngineBuilder) -> None:
        """A runner with plans, two of these, memory for what they capture, and kernels that choose tokens."""
        if not _attends(builder.features):
            raise UserError(
                "graphs is True, but must be False without the kernels' attention: torch's attention chooses "
                "its calls by the lengths of the requests, which a graph cannot"
            )
        from cuda_graphs.executors import ChunkGraphExecutor, DecodeGraphExecutor
        from cuda_graphs.memory import graph_bytes
        from cuda_graphs.runner import GraphRunner
        from cuda_graphs.sampling import TritonSamplerBackend

        builder.replace(self, runner=partial(GraphRunner, plans=builder.plans))
        if self.sampling == "triton":
            builder.replace(self, sampler_backend=TritonSamplerBackend())
        steps = partial(builder.size, "step_tokens")  # a later feature may have its own
        builder.plans["chunks"] = partial(
            ChunkGraphExecutor, most_tokens=self.graph_tokens, step_tokens=steps
        )
        builder.plans["decodes"] = partial(DecodeGraphExecutor, most_rows=self.graph_rows)
        builder.reserve.append(
            lambda whole: graph_bytes(
                whole.model,
                min(self.graph_rows, whole.size("max_rows")),
                self.graph_tokens,
                whole.size("step_tokens"),
            )
        )


@dataclass(frozen=True)
class Overlap(Feature):
    """Each step is scheduled while the one before is computed."""

    name: ClassVar[str] = "overlap"
    phase: ClassVar[int] = 9

    def install(self, builder: EngineBuilder) -> None:
        """Another loop."""
        builder.loops["overlap"] = lambda engine: OverlappedLoop()


def _attends(features: Mapping[str, Feature | None]) -> bool:
    """Return True if a feature has brought attention that a graph can hold."""
    return any(getattr(feature, "attends", False) for feature in features.values())
