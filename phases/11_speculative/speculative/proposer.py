"""The interface of what guesses draft tokens: n-grams, a smaller model, or a head."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from continuous.engine import Engine
from continuous.work import Work
from speculative.speculation import agreeing


class Proposer:
    """Interface of a guesser of draft tokens; one object serves all requests of an engine.

    watches: True if it has to see every step of a request, from the prompt on, or guesses badly.
    rehearses: True if a guess costs the device nothing, so that guesses are first compared with tokens that
        were sampled without them.
    """

    watches = False
    rehearses = False

    def agree(self, sampled: Sequence[int], drafts: Sequence[int]) -> int:
        """Return the number of accepted drafts of a request in a step.

        sampled: the tokens sampled at the drafts' positions, and one more. By default drafts are accepted
            up to the first that differs from its sampled token; another rule would change the generated
            text.
        """
        return agreeing(sampled, drafts)

    def guess(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int] | None]:
        """Return for each request the draft tokens that may follow its `tokens`; None: too early to say.

        None does not change the acceptance rate; an empty list counts as a wrong draft. lengths: for each
        request the number of drafts wanted; drafts beyond it are dropped.
        """
        raise NotImplementedError

    def attach(self, engine: Engine) -> None:
        """Store the engine for whose requests tokens are guessed; by default nothing is stored."""

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Learn from a finished step; by default do nothing.

        The step's hidden states are in `runner.last` of the engine.
        work: one request's tokens in the step. accepted: how many of its drafts the model confirmed.
        """

    def leave(self, request: Request) -> None:
        """Drop the data of a request that has ended (it has a finish reason) or is preempted."""
