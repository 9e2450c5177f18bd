"""Exit statuses of signals; delay Ctrl-C until an operation that must not be interrupted is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
"""Exit status of a process that SIGINT or SIGTERM has ended, as a shell reports it."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Return a context that delays SIGINT while its block runs; its handler runs when the block has ended.

    Python raises KeyboardInterrupt between any two operations of the main thread, so a count that is
    updated in several operations could become wrong. A second Ctrl-C does not wait: the block may hang.
    Threads other than the main one are never interrupted.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if not callable(before):
        yield
        return
    caught: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if caught:
            before(number, frame)
        caught.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(signal.SIGINT, caught[0])
