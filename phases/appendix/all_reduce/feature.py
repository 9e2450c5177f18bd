"""The kernels' sums as a feature of an engine in ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import EngineBuilder, Feature, find
from parallel.feature import Parallel, Split
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class CustomAllReduce(Feature):
    """Custom all-reduce: sum small tensors over ranks in memory that all GPUs share; NCCL sums the others."""

    name: ClassVar[str] = "own_sums"
    phase: ClassVar[int] = 14

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True if the engine has several ranks on GPUs, and the Triton kernels of phase 06."""
        here = find(others, Parallel) is not None and find(others, Kernels) is not None
        return here and device.type == "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Give the ranks their all-reduce over shared memory; a single rank sums nothing."""
        split = builder.feature(Split)
        if split is None:
            return
        if builder.model.device.type != "cuda" or builder.feature(Kernels) is None:
            raise UserError("own_sums is on, but sums by kernels need kernels on a GPU")
        from phases.appendix.all_reduce.symmetric import (
            OtherRanks,
            SymmetricMemoryReducer,
        )  # Triton comes with it

        ranks = split.ranks
        try:
            ranks.reducer = SymmetricMemoryReducer(
                ranks, builder.model.config.hidden_size, builder.model.dtype
            )
        except OtherRanks as error:
            if ranks.rank == 0:
                print(f"note: {error}: sums are NCCL's", file=sys.stderr, flush=True)
