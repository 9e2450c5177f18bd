"""A loop that speculates: the results of a step come before the next one is scheduled."""

from __future__ import annotations

from continuous.engine import Engine
from continuous.seams import Drafter, Loop


class Watcher(Drafter):
    """A `Drafter` that may have to see every token. By itself it guesses nothing."""

    @property
    def waits(self) -> bool:
        """True while every token must be known before a step is scheduled; then steps do not overlap."""
        return False


NO_GUESSES = Watcher()


def waits(engine: Engine) -> bool:
    """Return True while the engine's drafter has to see every token before a step is scheduled."""
    drafter = engine.scheduler.drafter
    return isinstance(drafter, Watcher) and drafter.waits


class Waiting:
    """A `Loop` around another one: what is under way lands first while the engine's drafter waits for it."""

    def __init__(self, inner: Loop) -> None:
        self.inner = inner

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""
        return self.inner.idle

    def advance(self, engine: Engine) -> None:
        """Advance, perhaps after what is under way has landed."""
        if waits(engine):
            self.inner.land(engine)
        self.inner.advance(engine)

    def land(self, engine: Engine) -> None:
        """Collect what is under way."""
        self.inner.land(engine)


def watched(engine: Engine) -> Waiting:
    """Return a loop that waits for what the engine's drafter has to see, around the one it has."""
    return Waiting(engine.loop)
