"""A drafter around another one."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work


class DrafterWrapper(Drafter):
    """A `Drafter` that does by itself what the one inside does."""

    def __init__(self, inner: Drafter = NO_DRAFTS) -> None:
        self.inner = inner

    @property
    def needs_finished_step(self) -> bool:
        """See `Drafter.needs_finished_step`."""
        return self.inner.needs_finished_step

    def begin(self, running: Sequence[Request]) -> bool:
        """See `Drafter.begin`."""
        return self.inner.begin(running)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        return self.inner.propose(request, most)

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """See `Drafter.on_step_finished`."""
        self.inner.on_step_finished(work, accepted)

    def leave(self, request: Request) -> None:
        """See `Drafter.leave`."""
        self.inner.leave(request)
