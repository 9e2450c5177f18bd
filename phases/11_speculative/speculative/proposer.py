"""The interface of what guesses draft tokens: n-grams, a smaller model, or a head."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.work import Work
from speculative.speculation import agreeing


class Proposer:
    """Guesses draft tokens; one object for all requests of an engine.

    watches: it has to see every step of a request, from the prompt on, or guesses badly.
    rehearses: a guess costs the device nothing, so it is first compared with tokens that come without it.
    """

    watches = False
    rehearses = False

    def agree(self, sampled: Sequence[int], drafts: Sequence[int]) -> int:
        """Return the number of accepted drafts, given the tokens sampled at their positions.

        Another rule than `agreeing` (those before the first difference) changes the text.
        """
        return agreeing(sampled, drafts)

    def guess(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int] | None]:
        """Return for each request the draft tokens that may follow its `tokens`; None: too early to say.

        None does not change the acceptance rate; an empty list counts as a wrong draft. lengths: the number
            of drafts wanted for each of the `requests`; drafts beyond it are dropped.
        """
        raise NotImplementedError

    def attach(self, engine: Engine) -> None:
        """Store the engine whose tokens are guessed."""

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Learn from a finished step; its hidden states are in `runner.last` until the next step.

        work: one request's tokens in it. accepted: its drafts that the model confirmed.
        """

    def leave(self, request: Request) -> None:
        """Forget a request that has ended (it has a finish reason) or is preempted."""
