"""Overlap where threads make masks: the host goes on between the two halves of a step.

The masks of a step depend on the tokens of the step before. They are begun as soon as these have come, and
made while the device computes the first half and the host deals out the tokens and schedules the step behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending, Results
from continuous.work import Work
from structured.loop import EarlyGrammarManager, MaskedLoop


class EarlyMaskLoop(MaskedLoop):
    """A `Loop` as `MaskedLoop` is, but the second half of a masked step comes with the next call.

    Args:
        masks: those of the engine.
        stage: given the works of the next step while masks are being made.

    half: a step whose second half comes with the next call of `advance`.
    """

    masks: EarlyGrammarManager
    half: Forwarded | None = None

    def __init__(
        self,
        masks: EarlyGrammarManager,
        stage: Callable[[Sequence[Work]], object] = lambda works: None,
    ) -> None:
        super().__init__(masks)
        self.stage = stage

    @property
    def idle(self) -> bool:
        """No step is on its way, nor half of one."""
        return super().idle and self.half is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step, or half of it, then wait for the one before."""
        works = engine.schedule()
        if self.half is not None:
            if works:
                self.stage(works)
            self._finish(engine)
            works = alive(engine, works)
        step = engine.forward(works)
        landing, self.in_flight_step = self.in_flight_step, None
        if landing is not None and step is not None and self.masks.needs_mask(step.works):
            self._begin(engine, step, landing)
            return
        self.in_flight_step = engine.sample(step)
        if landing is not None:
            engine.collect(landing)

    def finish_steps(self, engine: Engine) -> None:
        """Hand over the half that is left, and wait for what is on its way."""
        self._finish(engine)
        super().finish_steps(engine)

    def _begin(self, engine: Engine, step: Forwarded, landing: Pending) -> None:
        """Begin to make the masks of a step, and deal out the tokens of the one before meanwhile.

        Its second half then comes with the next step, or at once where the masks are made already.
        """
        results = engine.wait(landing)
        begun: bool | BaseException
        try:
            begun = self.masks.begin(
                step.works, {} if results is None else by_request(landing, results)
            )
        except (
            BaseException
        ) as error:  # a request that gets a token of the step before gets it all the same
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
            self._finish(engine)

    def _finish(self, engine: Engine) -> None:
        """Hand the second half of a step to the device, if one is left."""
        if self.half is not None:
            half, self.half = self.half, None
            self.in_flight_step = engine.sample(half)


def alive(engine: Engine, works: list[Work]) -> list[Work]:
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
