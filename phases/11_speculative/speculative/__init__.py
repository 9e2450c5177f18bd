"""Phase 11: speculative decoding. The next tokens are guessed cheaply and checked in one step."""

from __future__ import annotations

from quant import PRESET as BELOW
from speculative.feature import Speculate
from speculative.speculation import SpeculativeRunner

__all__ = ["LLM", "PRESET", "Speculate", "SpeculativeRunner", "load"]

PRESET = BELOW.plus(on=[Speculate])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of `quant.load` and the fields of `Speculate`, which is on by default.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
