"""Phase 12: structured output. Tokens that would leave a grammar are masked, so the output always parses."""

from __future__ import annotations

from common.sampling.grammar import Grammar
from speculative import PRESET as BELOW
from structured.feature import Structured

__all__ = ["LLM", "PRESET", "Grammar", "Structured", "load"]

PRESET = BELOW.plus(on=[Structured])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of the phase before, and the fields of `Structured`. Requests may have a
        `SamplingParams.grammar` if the engine has a `tokenizer`.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
