"""Phase 14: more than one GPU. A model is split over ranks (tensor parallelism)."""

from __future__ import annotations

from parallel.feature import Parallel
from parallel.launch import together
from parallel.worker_group import WorkerLostError
from serving import PRESET as BELOW

__all__ = ["LLM", "PRESET", "Parallel", "WorkerLostError", "load", "together"]

PRESET = BELOW.plus(on=[Parallel])
"""With one rank, which is an engine of the phase below."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`; with `tensor_parallel` above 1 it must be a name.
    options: those of the phase below, and the fields of `Parallel`. Rank 0 is in this process, and so is
        the engine that is returned; `loop.close()` of an engine in ranks lets the other processes go.

Raises:
    UserError: an option is unknown or out of its limits, features do not go together, or the model cannot
        be cut in so many parts.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
