"""Phase 15: replicas. A server runs as copies on GPUs and machines; a router chooses one for each request."""

from __future__ import annotations

from parallel import PRESET as BELOW

__all__ = ["LLM", "PRESET", "load"]

PRESET = BELOW.plus()
"""The phase below's: a copy of a server changes nothing about its engine."""

load = PRESET.load
"""Load the engine of one replica, for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of the phase below.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
