"""What the command line and the benchmarks know of a phase: how it is named, loaded, and what it requires."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from common.errors import UserError
from common.events import Streams
from phases import PHASES, Phase, find_phase


def phase_named(text: str, *others: str) -> Phase:
    """The phase meant by `1`, `01`, `forward` or `01_forward`.

    Raises:
        UserError: there is none. It names the phases and the `others` that the caller takes as well.
    """
    phase = find_phase(text)
    if phase is None:
        names = [*(phase.name for phase in PHASES), *others]
        raise UserError(f"phase is {text!r}, but it must be one of {', '.join(names)}")
    return phase


def import_phase(phase: Phase) -> ModuleType:
    """The phase's package. Raises `UserError` when it cannot be used here.

    Phase 06 chooses Triton's interpreter when it is imported, which must be before Triton is; PyTorch imports
    that as soon as it makes random weights.
    """
    try:
        package = importlib.import_module(phase.package)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError(
            f"phase {phase.name} needs triton, which is not installed: see `ladder doctor`"
        ) from None
    if not hasattr(package, "load"):
        raise UserError(f"phase {phase.name} has no engine yet: its package has no load()")
    return package


def load_engine(phase: Phase, model: Any, **options: Any) -> Streams:
    """What the phase's package loads for a model's name or a loaded model."""
    engine: Streams = import_phase(phase).load(model, **options)
    return engine


def missing_for(phase: Phase, device: torch.device) -> str:
    """What `phase` needs that is not here, or nothing when it runs natively on `device`."""
    if phase.needs == "cuda" and device.type != "cuda":
        return "a CUDA device" if not torch.cuda.is_available() else "--device cuda"
    return ""
