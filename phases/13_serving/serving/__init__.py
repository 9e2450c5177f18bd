"""Phase 13: serving. The engine behind the API that every client speaks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from forward.model import Model
from paged_cache import PagedEngine
from structured import PRESET as BELOW

__all__ = ["LLM", "PRESET", "load"]

PRESET = BELOW.plus()
"""The phase below's: a server changes nothing about an engine."""


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """The engine that this phase serves, for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of the phase below.

    Raises:
        UserError: an option is unknown or out of its limits, or features do not go together.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
