"""A limit on the time that making an automaton takes: a pattern of ten characters can ask for years."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from common.errors import UserError

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the processor time of this thread inside the block: `check` raises after `seconds` of it."""
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def check() -> None:
    """Raise `UserError` if the time of `within` is used up; loops whose length a grammar decides call it."""
    if time.thread_time() > _deadline.get():
        raise UserError("a grammar takes too long to make: simplify it")
