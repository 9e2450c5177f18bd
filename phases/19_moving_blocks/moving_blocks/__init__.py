"""Phase 19: moving blocks. A KV block is bytes with a name, so host memory or a file can hold it."""

from __future__ import annotations

from hybrid_cache import PRESET as BELOW
from moving_blocks.feature import MovingBlocks

__all__ = [
    "LLM",
    "PRESET",
    "MovingBlocks",
    "load",
]

PRESET = BELOW.plus(on=[MovingBlocks])
"""Everything below, and two more tiers of the prefix cache."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Options are those of the phase below, and the fields of `MovingBlocks`.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
