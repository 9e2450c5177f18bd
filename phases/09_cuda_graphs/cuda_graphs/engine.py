"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the one before, but the host need not know them: they are on the device, where the
next step reads them. So the host runs one step ahead and learns what a token was one step late. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from continuous.engine import Engine
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

    def advance(self) -> None:
        """Launch the next step, then wait for the one before.

        Where tokens are masked, what may come next depends on what has come: the step's second half then
        waits for the tokens of the step before, while the device computes the first half. A drafter that
        guesses on the host has to see all tokens: while it `waits`, a step is scheduled when the one before
        it has ended.
        """
        if self._flying is not None and self.scheduler.drafter.waits:
            landed, self._flying = self._flying, None
            self.collect(landed)
        works = self.scheduler.schedule()
        if not works and self._flying is None and not self.scheduler.idle:
            raise AssertionError("requests are left, but the scheduler finds nothing to do")
        with self.marked(works):
            step = self.forward(works)
            landing, self._flying = self._flying, None
            if landing is not None and step is not None and self.masks.wants(step.works):
                self.collect(landing)
                landing = None
            self._flying = self.sample(step)
            if landing is not None:
                self.collect(landing)

    def _clock(self, pending: Pending, now: float) -> None:
        """A step's time begins when the one before it has ended, not when it was put into the queue."""
        pending.started = max(pending.started, self._landed)
        self._landed = now
        super()._clock(pending, now)


class OverlapEngine(RunAhead, PagedEngine):
    """A `PagedEngine` that runs ahead."""
