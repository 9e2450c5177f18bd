"""Phase 13: serving. The engine behind the API that every client speaks."""

from __future__ import annotations

from structured import PRESET as BELOW

__all__ = ["LLM", "PRESET", "load"]

PRESET = BELOW.plus()
"""The phase below's: a server changes nothing about an engine."""


load = PRESET.load
"""Make the engine that this phase serves, for a model's name or a loaded model."""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
