"""Overlap where tokens are masked: masks are made between the two halves of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Pending
from continuous.seams import GrammarManager
from continuous.work import Work

Landed = Mapping[Request, Sequence[int]]
"""Tokens that have been sampled for requests."""
NONE_LANDED: Landed = MappingProxyType({})


class EarlyGrammarManager(GrammarManager, Protocol):
    """`GrammarManager` that a loop may begin before it asks for them: a seam, for masks made by threads."""

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """Begin what `fill` will be asked for, now that every token before is known.

        landed: those of them that requests have not been given yet.

        Returns whether it is done already, so that no wait is left.
        """


class MaskedLoop:
    """A `Loop` as `OverlappedLoop` is, but masked steps are sampled when the tokens of the step before
    are known.

    masks: those of the engine.
    flying: the newest step, of which the host knows nothing yet.
    """

    in_flight_step: Pending | None = None

    def __init__(self, masks: GrammarManager) -> None:
        self.masks = masks

    @property
    def idle(self) -> bool:
        """No step is on its way."""
        return self.in_flight_step is None

    def advance(self, engine: Engine) -> None:
        """Launch the first half of the next step, collect the step before, launch the second half.

        The device computes the first half while the host reads tokens and makes masks of them. A step without
        masks need not wait: both halves are launched, and then the step before is collected. If collecting
        raises, the second half of a masked step is launched all the same.
        """
        step = engine.forward(engine.schedule())
        masked = step is not None and self.masks.needs_mask(step.works)
        if not masked:  # as ever: the host learns a token one step late
            landing, self.in_flight_step = self.in_flight_step, engine.sample(step)
            if landing is not None:
                engine.collect(landing)
            return
        try:
            self.finish_steps(engine)
        finally:  # Ctrl-C, raised when the tokens are dealt out, loses no step
            self.in_flight_step = engine.sample(step)

    def finish_steps(self, engine: Engine) -> None:
        """Wait for the step that is on its way."""
        landing, self.in_flight_step = self.in_flight_step, None
        if landing is not None:
            engine.collect(landing)
