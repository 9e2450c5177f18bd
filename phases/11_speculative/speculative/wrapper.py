"""A drafter around another one."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work


class DrafterWrapper(Drafter):
    """A drafter around another one, to which it passes all calls; subclasses change some."""

    def __init__(self, inner: Drafter = NO_DRAFTS) -> None:
        self.inner = inner

    @property
    def needs_finished_step(self) -> bool:
        """Return True while the drafter inside needs every token before a step is scheduled."""
        return self.inner.needs_finished_step

    def attach(self, engine: Engine) -> None:
        """Bind the drafter inside to an engine."""
        self.inner.attach(engine)

    def begin(self, running: Sequence[Request]) -> bool:
        """Let the drafter inside prepare for a step; return True if `propose` may be called in it."""
        return self.inner.begin(running)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` drafts of a request, from the drafter inside."""
        return self.inner.propose(request, most)

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Tell the drafter inside that a step completed. accepted: drafts of the work that the model
        confirmed.
        """
        self.inner.on_step_finished(work, accepted)

    def leave(self, request: Request) -> None:
        """Let the drafter inside drop a request that frees its row."""
        self.inner.leave(request)
