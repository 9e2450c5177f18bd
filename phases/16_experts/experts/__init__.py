"""Phase 16: mixture of experts. Each token goes through a few of many MLPs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from experts.expert_parallel import ExpertParallel
from experts.feature import MixtureOfExperts
from forward.model import Model
from paged_cache import PagedEngine
from parallel import PRESET as BELOW

__all__ = ["LLM", "PRESET", "ExpertParallel", "MixtureOfExperts", "load"]

PRESET = BELOW.plus(on=[MixtureOfExperts, ExpertParallel])


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """Make this phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of `parallel.load`, and the fields of `MixtureOfExperts` and `ExpertParallel`.

    Raises:
        UserError: an option is unknown or out of its limits, or features do not go together.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
