"""Two places where a later phase takes part in a step; here nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from common.request import Request
from continuous.work import Work


class Drafter(Protocol):
    """Guesses the next tokens of a request, to be verified in the step that computes its newest one.

    A drafter that derives from this class need not have more than `propose`.

    waits: whether every token must be known before a step is scheduled. While it is, steps do not overlap,
        and `landed` is told what became of each work.
    """

    @property
    def waits(self) -> bool:
        """See above."""
        return False

    def begin(self, running: Sequence[Request]) -> bool:
        """A step is about to be scheduled; returns whether anybody is to be asked for drafts in it."""
        return True

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` token ids that may follow `request.tokens`; none is always right."""
        ...

    def landed(self, work: Work, accepted: int) -> None:
        """A step has ended well for a work, and `accepted` of its drafts were right."""
        return None

    def leave(self, request: Request) -> None:
        """A request gives back its row: it has ended, or it is preempted."""
        return None


class Masks(Protocol):
    """Says which tokens may be chosen, between the two halves of a step."""

    def wants(self, works: Sequence[Work]) -> bool:
        """Whether any taker of these works is constrained. If so, `fill` must know every token before."""
        ...

    def fill(self, works: Sequence[Work]) -> Tensor:
        """`[S, ceil(V / 32)]` int32 on the device, one row a sample of the step; see `Sampler.sample`."""
        ...


class NoDrafts(Drafter):
    """A `Drafter` that guesses nothing."""

    def begin(self, running: Sequence[Request]) -> bool:
        """Nobody is asked."""
        return False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """None."""
        return ()


class NoMasks:
    """`Masks` for an engine in which every token may be chosen."""

    def wants(self, works: Sequence[Work]) -> bool:
        """Never."""
        return False

    def fill(self, works: Sequence[Work]) -> Tensor:
        """Not asked for."""
        raise NotImplementedError("nothing is masked")


NO_DRAFTS = NoDrafts()
NO_MASKS = NoMasks()
