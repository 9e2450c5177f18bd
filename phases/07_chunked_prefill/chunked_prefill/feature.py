"""Chunked prefill as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chunked_prefill.scheduler import ChunkedScheduler
from common.options import option
from paged_cache import EngineBuilder, Feature

STEP_TOKENS = 256


@dataclass(frozen=True)
class Chunked(Feature):
    """Split prompts so that a step stays within a budget of tokens; decodes come first."""

    name = "chunked_prefill"
    phase = 7

    chunk_tokens: int | None = option(
        None, "most tokens of one prompt in a step, if not all of it", low=1
    )

    def install(self, builder: EngineBuilder) -> None:
        """Replace the scheduler by one that splits prompts, and lower the default of `step_tokens` to 256."""
        builder.scheduler.replace(
            self, partial(ChunkedScheduler, chunk_tokens=self.chunk_tokens)
        )
        builder.default_step_tokens = STEP_TOKENS
