"""Interfaces by which later phases take part in a step, each with a default that does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from common.errors import UserError
from common.request import Request
from common.rules import NO_GRAMMARS
from common.sampling.grammar import Grammar
from common.sampling.sampler import TokenBitmask
from continuous.work import Work

if TYPE_CHECKING:
    from continuous.engine import Engine


class Drafter:
    """Guesses the next tokens of a request, which the step that computes its newest token verifies.

    This base class guesses nothing; phase 11's drafters override `begin` and `propose`.
    """

    def begin(self, running: Sequence[Request]) -> bool:
        """Prepare for a step that is about to be scheduled, given the requests that run. Returns True if
        `propose` may be called in it.
        """
        return False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` token ids that may follow the tokens of a request; an empty list is allowed.

        Where the newest token is still on its way (`Request.placeholders`), drafts follow that token and
        must be certain to be accepted.
        """
        return ()

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Record that a step completed. work: one request's tokens in it. accepted: its drafts that the
        model confirmed.
        """

    def leave(self, request: Request) -> None:
        """Drop a request's data, because it frees its row: it has ended, or it is preempted."""


class Loop(Protocol):
    """Interface of a loop that runs an engine's steps, and holds those that are launched and not
    collected.
    """

    @property
    def idle(self) -> bool:
        """Return True if no step is in flight."""

    def advance(self, engine: Engine) -> None:
        """Launch the engine's next step, and append the tokens of a step launched before to their
        requests.
        """


class SequentialLoop:
    """A loop that waits for each step's results before it schedules the next step."""

    idle = True

    def advance(self, engine: Engine) -> None:
        """Launch the engine's next step, wait for it, and append its tokens to their requests."""
        pending = engine.sample(engine.forward(engine.schedule()))
        if pending is not None:
            engine.collect(pending)


class GrammarManager:
    """Makes the masks of tokens that a grammar allows, between the halves of a step; here there are none.

    A request whose grammar is still being compiled stays outside the waiting queue, so that no other waits
    for it.

    active: False until a request may have to wait, or needs masks; `check` alone is called until then.
    """

    active = False

    def check(self, grammar: Grammar) -> None:
        """Start to compile a request's grammar. Any thread may call this.

        Raises:
            UserError: the grammar cannot be used here.
        """
        raise UserError(NO_GRAMMARS)

    def ready(self, request: Request) -> bool:
        """Return True if the grammar of a request is compiled; else the engine asks again at every step.

        Raises:
            UserError: the grammar cannot be compiled.
        """
        return True

    def wait_until_compiled(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled, or raise `UserError` if it cannot be used."""

    def begin(self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]) -> bool:
        """Start to compute the masks of a step, whose earlier tokens are all known now.

        works: the step's requests and tokens. sampled: by request, the newest tokens, which are not
            appended to it yet.

        Returns:
            True if `fill_bitmask` will not have to wait.
        """
        return True

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the bit masks of allowed tokens for the samples of a step, in order; None: all tokens are
        allowed.

        works: the step's requests and tokens.
        """
        return None

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return the requests whose grammar has failed since the last call, each with its error."""
        return []


NO_DRAFTS = Drafter()
NO_GRAMMAR_MANAGER = GrammarManager()
SEQUENTIAL_LOOP = SequentialLoop()
