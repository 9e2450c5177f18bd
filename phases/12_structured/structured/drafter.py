"""Drafts under a grammar: what it forces is certain, and what it forbids need not be verified."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work
from structured.masks import Constraint


class GrammarDrafter:
    """A `Drafter` around another one.

    Where a grammar leaves no choice it says what comes (jump-forward: Zheng et al., "SGLang", arXiv
    2312.07104): these drafts go the way of all drafts, and each is right, since its own mask allows nothing
    else. Elsewhere the other drafter guesses, and its guess is cut before the first token that the grammar
    forbids, so that every draft has a mask.

    Args:
        inner: guesses for requests with and without a grammar.
        jump_forward: whether to draft what is forced.

    forced: how many tokens were drafted because a grammar left no choice.
    refused: how many guesses of the other drafter a grammar has cut off.
    """

    def __init__(self, inner: Drafter = NO_DRAFTS, *, jump_forward: bool = True) -> None:
        self.inner, self.jump_forward = inner, jump_forward
        self.forced = self.refused = 0

    @property
    def waits(self) -> bool:
        """As the other drafter: forced tokens alone are not worth waiting for."""
        return bool(getattr(self.inner, "waits", False))

    def begin(self, running: Sequence[Request]) -> bool:
        """Whether anybody is to be asked in the next step."""
        begin = getattr(self.inner, "begin", None)
        asked = self.inner is not NO_DRAFTS if begin is None else bool(begin(running))
        return asked or self.jump_forward

    def landed(self, work: Work, accepted: int) -> None:
        """For the other drafter, if it wants to know."""
        if (landed := getattr(self.inner, "landed", None)) is not None:
            landed(work, accepted)

    def leave(self, request: Request) -> None:
        """For the other drafter, if it wants to know."""
        if (leave := getattr(self.inner, "leave", None)) is not None:
            leave(request)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Forced tokens, or else as much of the other drafter's guess as the grammar takes."""
        constraint = request.constraint
        if not isinstance(constraint, Constraint):
            return self.inner.propose(request, most)
        if constraint.follow(request):
            return ()  # the masks will say what is wrong
        forced = constraint.matcher.forced()[:most] if self.jump_forward else ()
        guess = self.inner.propose(request, most)
        count = constraint.matcher.agrees(guess) if guess else 0
        self.refused += len(guess) - count
        if len(forced) >= count:
            self.forced += len(forced)
            return forced
        return guess[:count]
