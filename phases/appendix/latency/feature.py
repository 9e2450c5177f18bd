"""Kernels for decode steps of one token, as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_graphs import Graphs
from paged_cache import EngineBuilder, Feature
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class Latency(Feature):
    """Run steps of one token by kernels of their own, which gain inside CUDA graphs."""

    name = "latency"
    phase = 9
    for_draft_models = True
    needs = (Kernels,)
    on_with = (Graphs, Kernels)

    def install(self, builder: EngineBuilder) -> None:
        """Add one-token kernels to the model's fused linear layers and transformer blocks (phase 06's)."""
        from phases.appendix.latency.layers import install

        install(builder.own_model())
