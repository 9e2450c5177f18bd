"""Engines by the name under which they are measured: a phase's own, or one with the appendix's features."""

from __future__ import annotations

from typing import Any

from benchmarks.evidence import APPENDIX
from common.errors import UserError
from paged_cache import PagedEngine
from phases import find_phase
from phases.registry import import_phase, load_engine


def engine_of(variant: str, model: Any, **options: Any) -> PagedEngine:
    """Return the engine that a variant's name says, for a model's name or a loaded model; from phase 05 on.

    The name begins with the phase. If it ends with `APPENDIX`, the engine is what `ladder serve` would start;
    else it has the features of the phase and of those below it, and no other. So no name hides a feature.
    """
    phase = find_phase(variant.split(",")[0].split(" ")[0].split("+")[0])
    if phase is None:
        raise UserError(f"variant is {variant!r}, but must begin with a phase")
    made = (
        load_engine(phase, model, **options)
        if variant.endswith(APPENDIX)
        else import_phase(phase).load(model, **options)
    )
    assert isinstance(made, PagedEngine)
    return made
