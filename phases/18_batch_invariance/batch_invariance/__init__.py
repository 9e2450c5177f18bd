"""Phase 18: batch invariance. A request gets the same bits, whatever else is in its batch."""

from __future__ import annotations

from batch_invariance.feature import BatchInvariance
from hybrid_cache import PRESET as BELOW

__all__ = ["LLM", "PRESET", "BatchInvariance", "load"]

PRESET = BELOW.plus(on=[BatchInvariance])
"""Everything below, and a fixed order of every sum."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model."""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
