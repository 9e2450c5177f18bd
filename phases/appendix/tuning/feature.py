"""Tuned block sizes and the rehearsal as features of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import Feature, Parts


@dataclass(frozen=True)
class Tuned(Feature):
    """Kernels run in the configurations that `--autotune` has found on this machine."""

    name: ClassVar[str] = "tuned"
    phase: ClassVar[int] = 6

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On with kernels."""
        return others.get("kernels") is not None

    def install(self, parts: Parts) -> None:
        """Let the tables of block sizes ask for winners first."""
        need_kernels(self, parts)
        from phases.appendix.tuning.winners import DECODING, PREFILLING

        DECODING.use()
        PREFILLING.use()
        if find_spec("cuda_graphs") is not None:  # a copy of the course may end below phase 09
            from phases.appendix.tuning.lone import GEMVS, LONES

            GEMVS.use()
            LONES.use()


@dataclass(frozen=True)
class Rehearsal(Feature):
    """On a GPU, every kernel is compiled at the start, not when it is first met."""

    name: ClassVar[str] = "rehearsal"
    phase: ClassVar[int] = 6

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On with kernels on a GPU."""
        return device.type == "cuda" and others.get("kernels") is not None

    def install(self, parts: Parts) -> None:
        """Play made-up requests when the engine is complete."""
        need_kernels(self, parts)
        if parts.model.device.type == "cuda":
            from phases.appendix.tuning.rehearsal import rehearse

            parts.stages["rehearse"].append(lambda whole: rehearse(whole.engine))


def need_kernels(feature: Feature, parts: Parts) -> None:
    """Raise `UserError` for an engine that has no kernels."""
    if "kernels" not in parts.features:
        raise UserError(f"{feature.name} is for kernels, which are off: switch them on with kernels=True")
