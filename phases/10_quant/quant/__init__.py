"""Phase 10: weights, keys and values of 8 and 4 bits. Fewer bytes a token, and what they cost in quality."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from cuda_graphs import PRESET as BELOW
from forward.model import Model
from paged_cache import PagedEngine
from quant.feature import Quant
from quant.formats import SCHEMES, Scheme
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight

__all__ = ["LLM", "PRESET", "SCHEMES", "Quant", "QuantLinear", "QuantizedWeight", "Scheme", "load"]

PRESET = BELOW.plus(on=[Quant])


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of `cuda_graphs.load`, and the fields of `Quant`.

    Raises:
        UserError: an option is unknown or out of its limits, or features do not go together.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
