"""A loop in which the device drafts."""

from __future__ import annotations

import time

from continuous.engine import Engine
from continuous.seams import Loop
from phases.appendix.drafting_in_graphs.steps import Ahead, Flight
from speculative.loops import Watcher


class InGraph:
    """A `Loop` around another one: while all that runs is decodes, the device drafts.

    The next step is launched before the host knows how far the last one came: the device knows, and that is
    enough. Whatever else there is to do (a request waits, a prompt is not done, a request wants
    log-probabilities) is done by steps of the inner loop, as soon as that last one has landed.

    drafter: the engine's. ahead: launches such steps. flight: the newest of them.
    """

    flight: Flight | None = None

    def __init__(self, inner: Loop, drafter: Watcher, ahead: Ahead) -> None:
        self.inner, self.drafter, self.ahead = inner, drafter, ahead

    @property
    def idle(self) -> bool:
        """True if no step of either kind is under way."""
        return self.inner.idle and self.flight is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step that drafts and collect the one before; or advance the inner loop."""
        if self.drafter.waits:
            self.inner.land(engine)
        if self.inner.idle:
            before, self.flight = self.flight, None
            started = time.perf_counter()
            self.flight = self.ahead.launch(before)
            if self.flight is not None:
                self.flight.started = started
            elif before is not None:
                self.ahead.drafter.speculator.pace.skip()  # two will have landed
            if before is not None:
                self._collect(engine, before)
            if self.flight is not None or (before is not None and engine.scheduler.idle):
                return
        self.inner.advance(engine)

    def land(self, engine: Engine) -> None:
        """Collect what is under way."""
        landing, self.flight = self.flight, None
        if landing is not None:
            self._collect(engine, landing)
        self.inner.land(engine)

    def _collect(self, engine: Engine, flight: Flight) -> None:
        self.ahead.landing = flight
        engine.collect(flight)
