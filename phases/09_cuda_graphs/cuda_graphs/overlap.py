"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the one before, but the host need not know them: they are on the device, where the
next step reads them. So the host runs one step ahead and learns what a token was one step late. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending, Results
from continuous.work import Work


class OverlappedLoop:
    """A `Loop` that launches a step before it reads the results of the last one.

    What changes for a request: nothing but time. It is scheduled on a *placeholder* for the token that is on
    its way. If that token ends it, the step that was scheduled meanwhile computes one token too many, which
    `collect` drops; its row and blocks may have a new owner by then, whose first write comes later in the
    device's queue than that last stray one.

    Two things must be known on the host earlier. A drafter that guesses sees every token before a step is
    scheduled. And the masks of a step depend on the tokens of the step before: they are begun as soon as
    these have come, and the second half of the step is launched when they are done.

    Args:
        prefetchers: called with the works of the next step while masks are being made.

    in_flight_step: the newest step, of which the host knows nothing yet.
    half: a step whose second half is not launched yet, since its masks are being made.
    """

    in_flight_step: Pending | None = None
    half: Forwarded | None = None

    def __init__(self, prefetchers: Sequence[Callable[[Sequence[Work]], object]] = ()) -> None:
        self.prefetchers = prefetchers

    @property
    def idle(self) -> bool:
        """True if no step is on its way, nor half of one."""
        return self.in_flight_step is None and self.half is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step, or half of it, then wait for the one before."""
        if engine.scheduler.drafter.needs_finished_step:
            self.finish_steps(engine)
        step = engine.forward(self._schedule(engine))
        landing, self.in_flight_step = self.in_flight_step, None
        if step and landing and engine.grammar_manager.needs_mask(step.works):
            self._begin_masks(engine, step, landing)
            return
        self.in_flight_step = engine.sample(step)
        if landing is not None:
            engine.collect(landing)

    def finish_steps(self, engine: Engine) -> None:
        """Launch the half that is left, and wait for what is on its way."""
        self._sample_half(engine)
        landing, self.in_flight_step = self.in_flight_step, None
        if landing is not None:
            engine.collect(landing)

    def _schedule(self, engine: Engine) -> list[Work]:
        """Decide the next step, and launch the half that is left of the one before."""
        works = engine.schedule()
        if self.half is None:
            return works
        for prefetch in self.prefetchers if works else ():
            prefetch(works)
        self._sample_half(engine)
        return unfinished(engine, works)

    def _begin_masks(self, engine: Engine, step: Forwarded, landing: Pending) -> None:
        """Begin to make the masks of a step, and append the tokens of the step before meanwhile.

        Its second half then comes with the next step, or at once where the masks are made already.
        """
        results = engine.wait(landing)
        sampled = {} if results is None else by_request(landing, results)
        begun: bool | BaseException
        try:
            begun = engine.grammar_manager.begin(step.works, sampled)
        except BaseException as error:  # the step before is collected all the same
            begun = error
        self.half = step
        if results is not None:
            engine.append_tokens(landing, results)
        if isinstance(begun, BaseException):
            self.half = None
            engine.fail(step.works, begun)
            if not isinstance(begun, Exception):
                raise begun
        elif begun:
            self._sample_half(engine)

    def _sample_half(self, engine: Engine) -> None:
        """Hand the second half of a step to the device, if one is left."""
        if self.half is not None:
            half, self.half = self.half, None
            self.in_flight_step = engine.sample(half)


def unfinished(engine: Engine, works: list[Work]) -> list[Work]:
    """Leave out the works of requests that ended since they were scheduled: their room is given back."""
    left = []
    for work in works:
        if any(
            request.finish_reason is None
            for request in work.sampled_requests or (work.request,)
        ):
            left.append(work)
        else:
            engine.scheduler.finish_step(work, computed=False)
    return works if len(left) == len(works) else left


def by_request(pending: Pending, results: Results) -> dict[Request, list[int]]:
    """Return the tokens of a step, without their log-probabilities and without those that are none (NaN)."""
    sampled_requests = (request for work in pending.works for request in work.sampled_requests)
    pairs = zip(sampled_requests, results, strict=True)
    return {request: [token for token, _ in given if token >= 0] for request, given in pairs}
