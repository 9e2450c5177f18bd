"""Phase 14: more than one GPU. A model is split over ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from forward.model import Model
from paged_cache import PagedEngine
from parallel.crew import RanksLost
from parallel.feature import Parallel
from parallel.launch import together
from serving import PRESET as BELOW

__all__ = ["LLM", "PRESET", "Parallel", "RanksLost", "load", "together"]

PRESET = BELOW.plus(on=[Parallel])
"""With one rank, which is an engine of the phase below."""


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`; with `tensor_parallel` above 1 it must be a name.
        options: those of the phase below, and the fields of `Parallel`. Rank 0 is in this process, and so is
            the engine that is returned; `loop.close()` of an engine in ranks lets the other processes go.

    Raises:
        UserError: an option is unknown or out of its limits, features do not go together, or the model cannot
            be cut in so many parts.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
