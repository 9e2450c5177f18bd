"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the step before, but only on the device, where it reads them. So the host can
launch it before it has seen them, and reads each token while the next step is computed. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from continuous.engine import Engine
from continuous.runner import Forwarded, Pending
from continuous.seams import Drafter
from continuous.work import Work
from cuda_graphs.masked_steps import begin_masks, unfinished


class WaitingDrafter(Drafter):
    """A drafter that may have to see every token on the host before the next step is scheduled."""

    @property
    def needs_finished_step(self) -> bool:
        """Return True while every token must be on the host before a step is scheduled; here False."""
        return False


class OverlappedLoop:
    """A loop of engine steps that launches the next step before it reads the results of the last one.

    A request is scheduled on a *placeholder* for the token that is on its way to the host. If that token
    ends the request, the step that was scheduled meanwhile computes one token too many, which
    `Engine.collect` drops. The request's row and blocks may belong to another request by then; the first
    write of that request comes later in the device's queue than the write of the dropped token.

    Two parts need tokens on the host earlier. Some drafters must see every token before a step is
    scheduled. And the grammar masks of a step depend on the tokens of the step before: they are begun as
    soon as these tokens have arrived, and the step's sampling is launched when its masks are ready.

    Args:
        prefetchers: called with the next step's works (each one request's tokens) while masks are made.

    in_flight_step: the newest step whose sampling is launched and whose results the host has not read.
    half: a step whose forward pass is launched, but not its sampling, because its masks are not ready.
    """

    in_flight_step: Pending | None = None
    half: Forwarded | None = None

    def __init__(self, prefetchers: Sequence[Callable[[Sequence[Work]], object]] = ()) -> None:
        self.prefetchers = prefetchers

    @property
    def idle(self) -> bool:
        """Return True if no launched step waits for its sampling, or for the host to read its results."""
        return self.in_flight_step is None and self.half is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step, or its forward pass if it needs masks; then append the tokens of the step
        before.
        """
        if needs_finished_step(engine.scheduler.drafter):
            self.finish_steps(engine)
        step = engine.forward(self._schedule(engine))
        previous, self.in_flight_step = self.in_flight_step, None
        if step and previous and engine.needs_mask(step.works):
            self.half, self.in_flight_step = begin_masks(engine, step, previous)
            return
        self.in_flight_step = engine.sample(step)
        if previous is not None:
            engine.collect(previous)

    def finish_steps(self, engine: Engine) -> None:
        """Finish all launched steps: sample the one that waits for its masks, and append all tokens."""
        self._sample_half(engine)
        previous, self.in_flight_step = self.in_flight_step, None
        if previous is not None:
            engine.collect(previous)

    def _schedule(self, engine: Engine) -> list[Work]:
        """Schedule the next step and return its works; sampling that waits for masks is launched first."""
        works = engine.schedule()
        if self.half is None:
            return works
        for prefetch in self.prefetchers if works else ():
            prefetch(works)
        self._sample_half(engine)
        return unfinished(engine, works)

    def _sample_half(self, engine: Engine) -> None:
        """Launch the sampling of the step that waits for its masks, if any; it is in flight then."""
        if self.half is not None:
            half, self.half = self.half, None
            self.in_flight_step = engine.sample(half)


def needs_finished_step(drafter: Drafter) -> bool:
    """Return True while a drafter has to see every token before a step is scheduled."""
    return isinstance(drafter, WaitingDrafter) and drafter.needs_finished_step
