"""Drafts under a grammar: what it forces is certain, and what it forbids need not be verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from common.request import Request
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work
from speculative.loops import HostDrafter
from speculative.stats import SpeculationStats
from structured.masks import Constraint

if TYPE_CHECKING:  # the library is imported when the first grammar comes
    from phases.appendix.guidance.matcher import GuidanceMatcher

FEW_IN_TURN = 2
"""Running requests, at most, for which a host drafts what is forced. With more a step saved is worth little,
and drafts cost a call of attention a layer, since they make queries of another length."""


class GrammarDrafter(HostDrafter):
    """A `Drafter` around another one.

    Where a grammar leaves no choice it says what comes (jump-forward: Zheng et al., "SGLang", arXiv
    2312.07104): these drafts go the way of all drafts, and each is right, since its own mask allows nothing
    else. Elsewhere the other drafter guesses, and its guess is cut before the first token that the grammar
    forbids, so that every draft has a mask.

    An engine that runs ahead schedules a step before it knows the token of the one before. If that token is
    forced, it is known all the same, and so is what is forced behind it. What is forced behind a choice has
    to wait for a step.

    Args:
        inner: guesses for requests with and without a grammar.
        jump_forward: whether to draft what is forced.
        most_ahead: running requests, at most, for which a step that runs ahead has drafts.
        in_turn: whether steps do not overlap as long as a request has a grammar and few run: where the device
            is the host, running ahead hides nothing, and would only see less of what is forced.

    looks_ahead: whether it drafts behind tokens on their way: if there are not too many requests.
    forced: how many tokens were drafted because a grammar left no choice.
    refused: how many guesses of the other drafter a grammar has cut off.
    stats: what came of all drafts; the other drafter's, if it counts.
    """

    def __init__(
        self,
        inner: Drafter = NO_DRAFTS,
        *,
        jump_forward: bool = True,
        most_ahead: int = 64,
        in_turn: bool = False,
    ) -> None:
        self.inner = inner
        self.jump_forward = jump_forward
        self.most_ahead = most_ahead
        self.in_turn = in_turn
        self.forced = self.refused = 0
        self.stats: SpeculationStats = getattr(self.inner, "stats", None) or SpeculationStats()
        self._jumping = self.looks_ahead = False

    @property
    def needs_finished_step(self) -> bool:
        """While the other drafter does, or a request has a grammar and steps shall take turns."""
        return super().needs_finished_step or (self.in_turn and self._jumping)

    def begin(self, running: Sequence[Request]) -> bool:
        """Ask for drafts where the other drafter guesses, or a grammar may force."""
        guessing = self.inner.begin(running)
        few = not self.in_turn or len(running) <= FEW_IN_TURN
        self._jumping = (
            self.jump_forward and few and any(one.constraint is not None for one in running)
        )
        self.looks_ahead = self._jumping and len(running) <= self.most_ahead
        return guessing or self._jumping

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Count, and tell the other drafter what it asks for."""
        if super().needs_finished_step:
            self.inner.on_step_finished(work, accepted)
        elif work.drafts:
            self.stats.count(work, accepted)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Forced tokens, or else as much of the other drafter's guess as the grammar takes."""
        constraint = request.constraint
        if not isinstance(constraint, Constraint):
            return () if request.placeholders else self.inner.propose(request, most)
        matcher = cast("GuidanceMatcher", constraint.matcher)
        if request.placeholders:
            # Behind a token that is on its way, and forced itself. The matcher may be busy with its mask, so
            # this is what was seen before that began.
            known = (
                self.looks_ahead
                and constraint.taken == len(request.tokens) - request.prompt_len
            )
            drafts = matcher.certain[request.placeholders :][:most] if known else ()
            self.forced += len(drafts)
            return drafts
        if constraint.follow(request):  # the masks will say what is wrong
            return ()
        # Other steps that run ahead have no drafts.
        jumping = self.looks_ahead or (self._jumping and self.needs_finished_step)
        forced = matcher.forced()[:most] if jumping else ()
        guess = self.inner.propose(request, most)
        count = matcher.agrees(guess) if guess else 0
        self.refused += len(guess) - count
        if len(forced) >= count:
            self.forced += len(forced)
            return forced
        return guess[:count]
