"""Phase 11: speculative decoding. The next tokens are guessed cheaply and checked in one step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from forward.model import Model
from paged_cache import PagedEngine
from quant import PRESET as BELOW
from speculative.feature import Speculate
from speculative.speculation import Source, Speculator

__all__ = ["LLM", "PRESET", "Source", "Speculate", "Speculator", "load"]

PRESET = BELOW.plus(on=[Speculate])


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of `quant.load` and the fields of `Speculate`, which is on by default.

    Raises:
        UserError: an option is unknown or out of its limits, or features do not go together.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
