"""The kernels' sums as a feature of an engine in ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import EngineBuilder, Feature
from parallel.feature import Split


@dataclass(frozen=True)
class CustomAllReduce(Feature):
    """Small sums over ranks are made over shared memory; NCCL makes the others."""

    name: ClassVar[str] = "own_sums"
    phase: ClassVar[int] = 14

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """In ranks, with kernels on GPUs."""
        here = others.get("parallel") is not None and others.get("kernels") is not None
        return here and device.type == "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Give the ranks their way to add up; one rank adds nothing up."""
        split = builder.features.get("parallel")
        if not isinstance(split, Split):
            return
        if builder.model.device.type != "cuda" or "kernels" not in builder.features:
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
