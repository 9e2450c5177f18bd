"""Checkpoint formats as a feature of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from paged_cache import Feature, Parts
from phases.appendix.checkpoint_formats.reading import ReadFormats
from quant.loading import Quantize


@dataclass(frozen=True)
class CheckpointFormats(Feature):
    """Checkpoints in AWQ's, GPTQ's, FP8's and compressed-tensors' formats load as they are."""

    name: ClassVar[str] = "checkpoint_formats"
    phase: ClassVar[int] = 10

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On with quantized layers."""
        return others.get("quant") is not None

    def prepare(self, parts: Parts) -> None:
        """Read what the checkpoint has in few bits, and leave the rest to `Quant`."""
        if not isinstance(parts.linears, Quantize):
            raise UserError("checkpoint_formats is for quant, which is off: switch it on with quant=True")
        parts.wrap(self, linears=lambda plain: ReadFormats(plain.scheme, plain.head))

    def install(self, parts: Parts) -> None:
        """Do nothing more: the layers are loaded."""
