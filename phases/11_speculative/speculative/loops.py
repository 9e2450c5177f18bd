"""Loops that speculate: results come before the next step, or the device goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.request import Request
from continuous.engine import Engine
from continuous.seams import Drafter, Loop

if TYPE_CHECKING:  # there is no Triton everywhere
    from speculative.ahead.steps import Ahead, Flight


class Watcher(Drafter):
    """A `Drafter` that may have to see every token. By itself it guesses nothing."""

    def begin(self, running: Sequence[Request]) -> bool:
        """Ask for no drafts."""
        return False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """None."""
        return ()

    @property
    def waits(self) -> bool:
        """Whether every token must be known before a step is scheduled; then steps do not overlap."""
        return False


NO_GUESSES = Watcher()


class Waiting:
    """A `Loop` around another one: what is under way lands first while the drafter waits for it."""

    def __init__(self, inner: Loop, drafter: Watcher) -> None:
        self.inner, self.drafter = inner, drafter

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self.inner.idle

    def advance(self, engine: Engine) -> None:
        """Advance, perhaps after what is under way has landed."""
        if self.drafter.waits:
            self.inner.land(engine)
        self.inner.advance(engine)

    def land(self, engine: Engine) -> None:
        """Collect what is under way."""
        self.inner.land(engine)


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
        """Whether no step of either kind is under way."""
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
                self.ahead.speculator.came_back()
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


def watched(engine: Engine) -> Waiting:
    """Return a loop that waits for what the engine's drafter has to see, around the one it has."""
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, Watcher)
    return Waiting(engine.loop, drafter)
