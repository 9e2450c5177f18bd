"""A loop that speculates: the results of a step come before the next one is scheduled."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.seams import NO_DRAFTS, Drafter, Loop
from continuous.work import Work


class HostDrafter(Drafter):
    """A `Drafter` that may have to see every token. By itself it does what the one inside does."""

    inner: Drafter = NO_DRAFTS

    @property
    def needs_finished_step(self) -> bool:
        """True while every token must be known before a step is scheduled; then steps do not overlap."""
        return isinstance(self.inner, HostDrafter) and self.inner.needs_finished_step

    def begin(self, running: Sequence[Request]) -> bool:
        """See `Drafter`; so are the others."""
        return self.inner.begin(running)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Ask the one inside."""
        return self.inner.propose(request, most)

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Tell the one inside."""
        self.inner.on_step_finished(work, accepted)

    def leave(self, request: Request) -> None:
        """Tell the one inside."""
        self.inner.leave(request)


def needs_finished_step(engine: Engine) -> bool:
    """Return True while the engine's drafter has to see every token before a step is scheduled."""
    drafter = engine.scheduler.drafter
    return isinstance(drafter, HostDrafter) and drafter.needs_finished_step


class DraftLoop:
    """A `Loop` around another one: what is under way lands first while the engine's drafter waits for it."""

    def __init__(self, inner: Loop) -> None:
        self.inner = inner

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""
        return self.inner.idle

    def advance(self, engine: Engine) -> None:
        """Advance, perhaps after what is under way has landed."""
        if needs_finished_step(engine):
            self.inner.finish_steps(engine)
        self.inner.advance(engine)

    def finish_steps(self, engine: Engine) -> None:
        """Collect what is under way."""
        self.inner.finish_steps(engine)


def draft_loop_around(engine: Engine) -> DraftLoop:
    """Return a loop that waits for what the engine's drafter has to see, around the one it has."""
    return DraftLoop(engine.loop)
