"""The appendix: entries that make a phase faster, broader or easier to operate, and are no part of the climb.

An entry is a folder with a short README, its code, and tests in `tests/appendix`. No phase's package
imports an entry: the registry adds its feature to those of the phase, for the command line and the
benchmarks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_cache.builder import Feature

FEATURES: tuple[str, ...] = (
    "phases.appendix.rehearsal.rehearsal:Rehearsal",
    "phases.appendix.latency.feature:Latency",
    "phases.appendix.cpu_step.feature:CpuStep",
    "phases.appendix.checkpoint_formats.feature:CheckpointFormats",
    "phases.appendix.quant_kernels.feature:QuantKernels",
    "phases.appendix.all_reduce.feature:CustomAllReduce",
    "phases.appendix.drafting_in_graphs.feature:GraphDrafting",
    "phases.appendix.guidance.feature:Guidance",
    "phases.appendix.masked_graphs.feature:MaskedGraphs",
    "phases.appendix.delta_layers.feature:DeltaLayers",
)
"""Every feature of an entry as `module:class`, in the order in which features of one phase are installed.

Its `phase` is the phase that it extends; it is on where its `enabled_by_default` says so.
"""


def features() -> list[type[Feature]]:
    """Import the features of all entries."""
    found = []
    for place in FEATURES:
        module, name = place.split(":")
        found.append(getattr(importlib.import_module(module), name))
    return found
