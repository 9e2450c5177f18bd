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
    """Limit the processor time that this thread spends in a `with` block to `seconds`.

    Once the time is used up, the next call of `check` in the block raises `UserError`.
    """
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def check() -> None:
    """Raise `UserError` if the `with within(...)` block around this call has used up its processor time.

    Loops whose length a grammar decides call this. Outside of such a block it does nothing.
    """
    if time.thread_time() > _deadline.get():
        raise UserError("a grammar takes too long to make: simplify it")
