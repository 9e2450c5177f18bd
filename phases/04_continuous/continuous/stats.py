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
    """Counters of an engine. A step that computes more than one token for any request is a prefill step."""

    steps: int = 0
    decode_steps: int = 0
    computed_tokens: int = 0
    most_running: int = 0

    def begin(self, works: Sequence[Work], running: int) -> None:
        """Add a step to the counters. works: its requests and tokens. running: how many requests run."""
        tokens = sum(work.count for work in works)
        self.steps += 1
        self.decode_steps += tokens == len(works)
        self.computed_tokens += tokens
        self.most_running = max(self.most_running, running)


STEP = "step: "
"""Begins the name of the range around a step in a profile; the rest is "prefill" or "decode"."""


def marked(works: Sequence[Work]) -> AbstractContextManager[object]:
    """Return a context that names the step of these works in PyTorch's profiler, if one runs."""
    if not works or not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(
        STEP + ("decode" if all(work.count == 1 for work in works) else "prefill")
    )
