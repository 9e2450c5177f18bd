"""The kernels' sums as a feature of an engine in ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from common.errors import UserError, choice
from common.options import option
from paged_cache import Feature, Parts
from parallel.feature import Split
from parallel.ranks import Ranks
from parallel.reduce import PLAIN, Reducer

Way = Literal["auto", "nccl", "one-shot"]


@dataclass(frozen=True)
class OwnSums(Feature):
    """Small sums over ranks are made over shared memory; torch.distributed makes the others."""

    name: ClassVar[str] = "own_sums"
    phase: ClassVar[int] = 14
    without: ClassVar[Mapping[str, str]] = {"all_reduce": "nccl"}

    all_reduce: Way = option("auto", "how ranks add up: auto (by device), nccl, or one-shot up to 512 KiB")

    def __post_init__(self) -> None:
        """Check the option."""
        choice("all_reduce", self.all_reduce, get_args(Way))

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """In ranks."""
        return others.get("parallel") is not None

    def install(self, parts: Parts) -> None:
        """Give the ranks their way to add up; one rank adds nothing up."""
        split = parts.features.get("parallel")
        if isinstance(split, Split):
            split.ranks.reducer = self._reducer(split.ranks, parts)

    def _reducer(self, ranks: Ranks, parts: Parts) -> Reducer:
        """Choose how sums are made. Raises `UserError` for kernels where there can be none."""
        way = self.all_reduce
        can = parts.model.device.type == "cuda" and "kernels" in parts.features
        if way == "nccl" or (way == "auto" and not can):
            return PLAIN
        if not can:
            raise UserError(f"all_reduce is {way!r}, but must be 'nccl' or 'auto' without kernels on a GPU")
        from phases.appendix.all_reduce.symmetric import OtherRanks, Symmetric  # Triton comes with it

        try:
            return Symmetric(ranks, parts.model.config.hidden_size, parts.model.dtype)
        except OtherRanks as error:
            if way != "auto":
                raise
            if ranks.rank == 0:
                print(f"note: {error}: sums are NCCL's", file=sys.stderr, flush=True)
            return PLAIN
