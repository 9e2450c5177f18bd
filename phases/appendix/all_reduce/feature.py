"""The custom all-reduce as a feature of a tensor-parallel engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from common.errors import UserError
from paged_cache import EngineBuilder, Feature
from parallel.feature import Parallel, Split
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class CustomAllReduce(Feature):
    """Custom all-reduce: sum small tensors over ranks in memory that all GPUs share; NCCL sums the others."""

    name = "own_sums"
    phase = 14
    needs = (Kernels,)
    on_with = (Parallel, Kernels)
    on_device = "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Give each tensor-parallel rank an all-reduce over shared GPU memory.

        Does nothing for a single rank.

        Raises:
            UserError: the model is not on a GPU.
        """
        split = builder.feature(Split)
        if split is None:
            return
        if builder.model.device.type != "cuda":
            raise UserError("own_sums is on, but sums by kernels need a GPU")
        # Triton comes with it.
        from phases.appendix.all_reduce.symmetric import OtherRanks, SymmetricMemoryReducer

        ranks = split.ranks
        try:
            ranks.reducer = SymmetricMemoryReducer(
                ranks, builder.model.config.hidden_size, builder.model.dtype
            )
        except OtherRanks as error:
            if ranks.rank == 0:
                print(f"note: {error}: sums are NCCL's", file=sys.stderr, flush=True)
