"""Phase 07: chunked prefill. A long prompt is computed in chunks, so other requests need not wait for it."""

from __future__ import annotations

from chunked_prefill.feature import Chunked
from chunked_prefill.scheduler import ChunkedScheduler
from paged_cache import Preset

__all__ = ["LLM", "PRESET", "Chunked", "ChunkedScheduler", "load"]

PRESET = Preset(on=[Chunked])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of `paged_cache.load` and the fields of `Chunked`. `step_tokens`, which decodes and
        chunks share, is 256 by default.

Raises:
    UserError: an option is unknown or out of its limits.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
