"""The rehearsal as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import Feature, Parts


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
        if "kernels" not in parts.features:
            raise UserError("rehearsal is for kernels, which are off: switch them on with kernels=True")
        if parts.model.device.type == "cuda":
            from phases.appendix.rehearsal.rehearsal import rehearse

            parts.stages["rehearse"].append(lambda whole: rehearse(whole.engine))
