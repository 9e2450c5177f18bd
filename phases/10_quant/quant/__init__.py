"""Phase 10: weights, keys and values of 8 and 4 bits. Fewer bytes a token, and what they cost in quality."""

from __future__ import annotations

from cuda_graphs import PRESET as BELOW
from quant.feature import Quant
from quant.formats import Scheme

__all__ = ["LLM", "PRESET", "Quant", "Scheme", "load"]

PRESET = BELOW.plus(on=[Quant])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of `cuda_graphs.load`, and the fields of `Quant`.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
