"""Control of Python's garbage collector of reference cycles, which would stop an engine's steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 1000
"""Collections of the middle generation between two full collections, at least; Python's default is 10."""


def freeze_collector() -> None:
    """Freeze all objects that exist now, and let full garbage collections come less often from now on.

    A reference count of zero frees nearly everything. The collector is for cycles, and looks for them
    through every object of a process: 200 ms where PyTorch is imported, and still 5 ms with nothing but the
    thousands of requests that wait in line. No request's next token should wait for that.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Return a context in which the garbage collector is off, where freeing an object would do harm."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
