"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the one before, but the host need not know them: they are on the device, where the
next step reads them. So the host runs one step ahead and learns what a token was one step late. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from continuous.engine import Engine
from continuous.runner import Forwarded, Pending
from continuous.seams import Landed
from continuous.work import Work
from paged_cache import PagedEngine


class RunAhead(Engine):
    """An engine that launches a step before it reads the results of the last one.

    What changes for a request: nothing but time. It is scheduled on a *placeholder* for the token that is on
    its way. If that token ends it, the step that was scheduled meanwhile computes one token in vain, which
    `collect` drops; its row and blocks may have a new owner by then, whose first write comes later in the
    device's queue than that last stray one.

    Where tokens are masked, a step's second half waits for the tokens of the step before. Masks that take
    their time are begun as soon as these have come, and made while the device computes the first half and the
    host deals out the tokens and schedules the step behind.

    stage: called with the works of the next step while the masks of this one are being made.
    _flying: the newest step that is wholly handed to the device.
    _half: a step whose second half comes with the next call of `advance`.
    """

    stage: Callable[[Sequence[Work]], object] = staticmethod(lambda works: None)
    _flying: Pending | None = None
    _half: Forwarded | None = None
    _landed: float = 0.0

    @property
    def idle(self) -> bool:
        """Also: no step is on its way."""
        return super().idle and self._flying is None and self._half is None

    def advance(self) -> None:
        """Launch the next step, then wait for the one before.

        A drafter that guesses on the host has to see all tokens: while it `waits`, a step is scheduled when
        the one before it has ended.
        """
        if self.scheduler.drafter.waits:
            self._finish_half()
            if self._flying is not None:
                landed, self._flying = self._flying, None
                self.collect(landed)
        works = self.schedule()
        if not works and self._flying is None and self._half is None and not self.scheduler.idle:
            raise AssertionError("requests are left, but the scheduler finds nothing to do")
        with self.marked(works):
            if self._half is not None:
                if works:
                    self.stage(works)
                self._finish_half()
                works = self._alive(works)
            step = self.forward(works)
            landing, self._flying = self._flying, None
            if landing is not None and step is not None and self.masks.wants(step.works):
                self._begin_masks(step, landing)
                return
            self._flying = self.sample(step)
            if landing is not None:
                self.collect(landing)

    def _begin_masks(self, step: Forwarded, landing: Pending) -> None:
        """Begin to make the masks of a step, and deal out the tokens of the one before meanwhile.

        Its second half then comes with the next step, or at once where the masks are made already.
        """
        made: list[bool | BaseException] = []

        def begin(landed: Landed) -> None:
            try:
                made.append(self.masks.begin(step.works, landed))
            except BaseException as error:  # whoever gets a token of the step before gets it all the same
                made.append(error)

        self.collect(landing, begin)
        if not made:  # the step before has failed
            begin({})
        (begun,) = made
        if isinstance(begun, BaseException):
            self.fail(step.works, begun)
            if not isinstance(begun, Exception):
                raise begun
            return
        self._half = step
        if begun:
            self._finish_half()

    def _finish_half(self) -> None:
        """Hand the second half of a step to the device, if one is left."""
        if self._half is not None:
            half, self._half = self._half, None
            self._flying = self.sample(half)

    def _alive(self, works: list[Work]) -> list[Work]:
        """Without the works of requests that ended since they were scheduled: their room is given back."""
        alive = []
        for work in works:
            if any(request.finish_reason is None for request in work.takers or (work.request,)):
                alive.append(work)
            else:
                self.scheduler.land(work, computed=False)
        return works if len(alive) == len(works) else alive

    def _clock(self, pending: Pending, now: float) -> None:
        """A step's time begins when the one before it has ended, not when it was put into the queue."""
        pending.started = max(pending.started, self._landed)
        self._landed = now
        super()._clock(pending, now)


class OverlapEngine(RunAhead, PagedEngine):
    """A `PagedEngine` that runs ahead."""
