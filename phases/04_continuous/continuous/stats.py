"""Counters of an engine's steps, and named ranges around the steps in a profile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from continuous.work import Work


@dataclass
class Stats:
    """Counters of an engine.

    steps: all steps. decode_steps: those that compute one token for each of their requests.
    computed_tokens: tokens of all steps, drafts included. most_running: most requests that ran at a time.
    """

    steps: int = 0
    decode_steps: int = 0
    computed_tokens: int = 0
    most_running: int = 0

    def begin(self, works: Sequence[Work], running: int) -> None:
        """Add a step to the counters.

        works: each the tokens of one request in the step. running: number of running requests.
        """
        tokens = sum(work.count for work in works)
        self.steps += 1
        self.decode_steps += tokens == len(works)
        self.computed_tokens += tokens
        self.most_running = max(self.most_running, running)


STEP = "step: "
"""Begins the name of the range around a step in a profile; the rest is "prefill" or "decode"."""


def marked(works: Sequence[Work]) -> AbstractContextManager[object]:
    """Return a context manager that marks a step as "prefill" or "decode" in PyTorch's profiler.

    works: each the tokens of one request. It does nothing if no profiler runs or the step is empty.
    """
    if not works or not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(
        STEP + ("decode" if all(work.count == 1 for work in works) else "prefill")
    )
