"""The appendix: optional entries that make a phase (a chapter's engine) faster or broader.

An entry is a folder with a short README, its code, and tests in `tests/appendix`. No phase's package imports
an entry: the registry of features adds its feature to those of the phase, for the command line and the
benchmarks.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_cache.recipe import Feature

FEATURES = {
    "rehearsal.rehearsal:Rehearsal": 6,
    "latency.feature:Latency": 9,
    "cpu_step.feature:CpuStep": 9,
    "cpu_step.blocks:CpuBlocks": 10,
    "checkpoint_formats.feature:CheckpointFormats": 10,
    "quant_kernels.feature:QuantKernels": 10,
    "all_reduce.feature:CustomAllReduce": 14,
    "guidance.feature:Guidance": 12,
    "masked_graphs.feature:MaskedGraphs": 12,
    "delta_layers.feature:DeltaLayers": 17,
}
"""Every feature of an entry as `module:class`, in the order in which features of one phase are installed.

Behind it stands the phase that it extends; it is on where its `enabled_by_default` says so.
"""


def features(number: int) -> list[type[Feature]]:
    """Return the appendix's `Feature` classes that extend phase `number` or an earlier phase.

    They are imported, and those of one phase in the order of installation.
    """
    return [
        resolve_name(f"{__name__}.{place}")
        for place, phase in FEATURES.items()
        if phase <= number
    ]
