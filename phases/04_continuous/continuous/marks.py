"""Ranges around steps, by which a profile tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from continuous.work import Work

STEP = "step: "
"""Begins the name of the range around a step in a profile; the rest is "prefill" or "decode"."""


def marked(works: Sequence[Work]) -> AbstractContextManager[object]:
    """Return a range for PyTorch's profiler; without a profiler it is nothing."""
    if not works or not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(STEP + ("decode" if all(work.count == 1 for work in works) else "prefill"))
