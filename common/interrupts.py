"""Ctrl-C waits until what must not be left half done is done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Uninterrupted:
    """A block that SIGINT does not break; what it would have raised is raised at the block's end.

    Python raises KeyboardInterrupt between any two operations of the main thread, so books that take several
    operations would not balance. A second Ctrl-C does not wait: the block may hang. Other threads are never
    interrupted, and blocks inside a block change nothing.
    """

    def __init__(self) -> None:
        self._before: object = None
        self._depth = 0
        self._caught: FrameType | None = None
        self._pressed = False

    def __enter__(self) -> None:
        """Hold SIGINT back, if this thread gets it."""
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                self._pressed = False
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let SIGINT through again, and deliver the one that came meanwhile."""
        self._depth -= 1
        before = self._before
        if self._depth or not callable(before):
            return
        self._before = None
        signal.signal(signal.SIGINT, before)
        if self._pressed and error is None:
            before(signal.SIGINT, self._caught)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pressed and callable(self._before):
            self._before(number, frame)
        self._pressed, self._caught = True, frame
