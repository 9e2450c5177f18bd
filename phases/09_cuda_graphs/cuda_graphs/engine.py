"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the one before, but the host need not know them: they are on the device, where the
next step reads them. So the host runs one step ahead and learns what a token was one step late. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from continuous.engine import Engine, Output
from continuous.runner import Pending
from paged_cache import PagedEngine


class RunAhead(Engine):
    """An engine that launches a step before it reads the results of the last one.

    What changes for a request: nothing but time. It is scheduled on a *placeholder* for the token that is on
    its way. If that token ends it, the step that was scheduled meanwhile computes one token in vain, which
    `collect` drops; its row and blocks may have a new owner by then, whose first write comes later in the
    device's queue than that last stray one.
    """

    _flying: Pending | None = None
    _landed: float = 0.0

    @property
    def idle(self) -> bool:
        """Also: no step is on its way."""
        return super().idle and self._flying is None

    def step(self) -> list[Output]:
        """Launch the next step, then wait for the one before; tell what came of that."""
        works = self.scheduler.schedule()
        if not works and self._flying is None and not self.scheduler.idle:
            raise AssertionError("requests are left, but the scheduler finds nothing to do")
        landing, self._flying = self._flying, self.launch(works)
        if landing is not None:
            self.collect(landing)
        return self.drain()

    def _clock(self, pending: Pending, now: float) -> None:
        """A step's time begins when the one before it has ended, not when it was put into the queue."""
        pending.started = max(pending.started, self._landed)
        self._landed = now
        super()._clock(pending, now)


class OverlapEngine(RunAhead, PagedEngine):
    """A `PagedEngine` that runs ahead."""
