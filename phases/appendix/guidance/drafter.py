"""Draft the tokens that a grammar forces; cut other drafts before the first token that it forbids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from common.request import Request
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work
from cuda_graphs.overlap import WaitingDrafter, needs_finished_step
from speculative.speculation import SpeculativeRunner
from speculative.stats import SpeculationStats
from structured.constraint import Constraint

if TYPE_CHECKING:  # the library is imported when the first grammar comes
    from phases.appendix.guidance.matcher import GuidanceMatcher

MOST_SEQUENTIAL = 2
"""Most running requests with drafts of forced tokens while steps do not overlap. With more, a step saved
is worth little, and drafts cost one more call of attention a layer, since they make queries longer."""
MOST_OVERLAPPED = 4
"""Most running requests for which steps that overlap draft what is forced: such a step has no graph, so with
more requests drafts cost more than they save."""


class GrammarDrafter(WaitingDrafter):
    """A `Drafter` that adds tokens which a grammar forces to the drafts of another drafter.

    inner: proposes drafts for all requests. jump_forward: whether to draft forced tokens.
    in_turn: whether steps do not overlap while a request has a grammar and at most `MOST_SEQUENTIAL` run.
        On a CPU overlapping hides nothing, and fewer forced tokens would be known in time.

    Where a grammar leaves no choice, the tokens that must come are drafts (jump-forward: Zheng et al.,
    "SGLang", arXiv 2312.07104). They are verified like all drafts and always accepted: the mask of each
    allows that token only. Elsewhere the inner drafter proposes, and its drafts are cut before the first one
    that the grammar forbids, so that every draft has a mask.

    An overlapped step is scheduled before the token of the step before is known. If that token is forced, it
    is known all the same, and so are the tokens forced after it. Tokens that are forced after a free choice
    are drafted one step later.

    drafts_overlapped: whether overlapped steps have drafts now.
    forced, refused: numbers of forced tokens that were drafted, and of inner drafts that were cut off.
    stats: counts of all drafts; the inner drafter's, if it has any.
    """

    def __init__(
        self,
        inner: Drafter = NO_DRAFTS,
        *,
        jump_forward: bool = True,
        in_turn: bool = False,
    ) -> None:
        self.inner = inner
        self.jump_forward = jump_forward
        self.in_turn = in_turn
        self.forced = self.refused = 0
        self.stats = SpeculationStats()
        if isinstance(inner, SpeculativeRunner):
            self.stats = inner.stats
        self._jumping = self.drafts_overlapped = False

    @property
    def needs_finished_step(self) -> bool:
        """Return True if steps must not overlap now: for the inner drafter, or for forced tokens on a CPU."""
        return needs_finished_step(self.inner) or (self.in_turn and self._jumping)

    def begin(self, running: Sequence[Request]) -> bool:
        """Return True if a step of the `running` requests may have drafts; False if it has none."""
        guessing = self.inner.begin(running)
        worth = self.jump_forward and (not self.in_turn or len(running) <= MOST_SEQUENTIAL)
        self._jumping = worth and any(one.constraint is not None for one in running)
        self.drafts_overlapped = self._jumping and len(running) <= MOST_OVERLAPPED
        return guessing or self._jumping

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Count the drafts of a finished step, of which the model `accepted` some; the inner drafter counts
        them if it must see the step.
        """
        if needs_finished_step(self.inner):
            self.inner.on_step_finished(work, accepted)
        elif work.drafts:
            self.stats.count(work, accepted)

    def leave(self, request: Request) -> None:
        """Drop the data of a request that leaves the batch, in this drafter and in the inner one."""
        self.inner.leave(request)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` draft tokens for a request: the longer of two lists.

        These are the tokens that its grammar forces, and the inner drafter's up to the first forbidden one.
        While the request's newest token is still being computed, only forced tokens that were noted before.
        """
        constraint = request.constraint
        if not isinstance(constraint, Constraint):
            return () if request.placeholders else self.inner.propose(request, most)
        matcher = cast("GuidanceMatcher", constraint.matcher)
        if request.placeholders:
            # The newest token is in flight, and forced. Threads may be using the matcher, so the tokens come
            # from `certain`, which was noted before they began.
            known = self.drafts_overlapped and not constraint.unseen(request)
            drafts = matcher.certain[request.placeholders :][:most] if known else ()
            self.forced += len(drafts)
            return drafts
        if constraint.follow(request) or matcher.effort.slow:
            return ()  # the masks will say what is wrong, or each draft would need one more slow mask
        jumping = self.drafts_overlapped or (self._jumping and self.needs_finished_step)
        forced = matcher.forced()[:most] if jumping else ()
        guess = self.inner.propose(request, most)
        count = matcher.agrees(guess) if guess else 0
        self.refused += len(guess) - count
        if len(forced) >= count:
            self.forced += len(forced)
            return forced
        return guess[:count]
