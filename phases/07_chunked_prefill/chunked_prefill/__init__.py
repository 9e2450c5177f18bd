"""Phase 07: chunked prefill. A long prompt no longer makes everybody else wait."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import paged_cache
from chunked_prefill.scheduler import ChunkedScheduler
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.llm import LLM as PagedLLM

__all__ = ["LLM", "ChunkedScheduler", "load"]


def load(
    model: str | Path | Model, *, step_tokens: int = 256, chunk_tokens: int | None = None, **options: Any
) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        step_tokens: tokens computed in a step, decodes and chunks together.
        chunk_tokens: most tokens of one prompt in a step; by default all that the budget has left.
        options: see `paged_cache.load`.

    Raises:
        UserError: an option is out of its limits.
    """
    scheduler = partial(ChunkedScheduler, chunk_tokens=chunk_tokens)
    return paged_cache.load(model, step_tokens=step_tokens, make_scheduler=scheduler, **options)


class LLM(PagedLLM):
    """See `paged_cache.llm.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)
