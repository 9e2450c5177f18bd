"""A speculator whose steps may draft on the device: asked by a loop before it is asked by the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.request import Request
from continuous.work import Work
from speculative.loops import Watcher
from speculative.speculation import Speculator
from speculative.stats import SpeculationStats


class InGraphDrafter(Watcher):
    """A `Drafter` around a speculator. An ordinary step in the place of one in a graph begins only once.

    begun: what `begin` will return for the next step, if a loop has asked already.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.begun: bool | None = None

    @property
    def stats(self) -> SpeculationStats:
        """Counts of what came of the guesses."""
        return self.speculator.stats

    @property
    def waits(self) -> bool:
        """See `Watcher`."""
        return self.speculator.waits

    def begin(self, running: Sequence[Request]) -> bool:
        """See `Speculator.begin`."""
        begun, self.begun = self.begun, None
        return self.speculator.begin(running) if begun is None else begun

    def guesses(self, running: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """Return what `begin` guesses."""
        self.begun = self.speculator.begin(running)
        return self.speculator.guesses

    def wanted(self, running: Sequence[Request]) -> int:
        """Return how many drafts of a request pay in the next step, if they cost the host nothing."""
        self.begun = False
        self.speculator.guesses.clear()
        return max(self.speculator.pace.lengths(running))

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Speculator.propose`."""
        return self.speculator.propose(request, most)

    def landed(self, work: Work, accepted: int) -> None:
        """See `Speculator.landed`."""
        self.speculator.landed(work, accepted)

    def leave(self, request: Request) -> None:
        """See `Speculator.leave`."""
        self.speculator.leave(request)
