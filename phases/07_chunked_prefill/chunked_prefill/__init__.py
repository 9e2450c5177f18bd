"""Phase 07: chunked prefill. A long prompt no longer makes all other requests wait."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from chunked_prefill.feature import Chunked
from chunked_prefill.scheduler import ChunkedScheduler
from common.text import llm
from forward.model import Model
from paged_cache import PagedEngine, Preset

__all__ = ["LLM", "PRESET", "Chunked", "ChunkedScheduler", "load"]

PRESET = Preset(on=[Chunked])


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of `paged_cache.load` and the fields of `Chunked`. `step_tokens`, which decodes and
            chunks share, is 256 by default.

    Raises:
        UserError: an option is unknown or out of its limits.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
