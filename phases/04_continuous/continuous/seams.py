"""Interfaces by which later phases take part in a step, each with a default that changes nothing."""

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
    """Guesses the next tokens of requests (speculative decoding); the step that computes them verifies them.

    This base class guesses nothing; phase 11's drafters override `begin` and `propose`.
    """

    def begin(self, running: Sequence[Request]) -> bool:
        """Prepare for a step that is about to be scheduled, given all running requests.

        Returns True if `propose` is to be called for requests of this step, False if it has no drafts.
        """
        return False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` token ids that may follow the tokens of a request; an empty list is allowed.

        If the newest token is still being sampled (`request.placeholders`), the drafts follow that unknown
        token, and must be certain to be accepted.
        """
        return ()

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Record that a step completed for one request.

        work: the request's tokens in the step. accepted: number of its drafts that the model confirmed.
        """

    def leave(self, request: Request) -> None:
        """Drop what is stored for a request that frees its row, because it has ended or is preempted."""


class Loop(Protocol):
    """Interface of a loop that runs an engine's steps, and keeps those launched but not collected."""

    @property
    def idle(self) -> bool:
        """Return True if no step is in flight."""

    def advance(self, engine: Engine) -> None:
        """Launch the engine's next step, and append the tokens of an earlier one to their requests."""


class SequentialLoop:
    """A loop that waits for each step's results before it schedules the next step."""

    idle = True

    def advance(self, engine: Engine) -> None:
        """Launch the engine's next step, wait for it, and append its tokens to their requests."""
        pending = engine.sample(engine.forward(engine.schedule()))
        if pending is not None:
            engine.collect(pending)


class GrammarManager:
    """Makes bit masks of the tokens that a request's grammar allows, for the sampling half of a step.

    This base class has no grammars. A request whose grammar is still being compiled stays outside the
    waiting queue, so that no other request waits for it.

    active: False until a request with a grammar has come; until then the engine calls `check` alone.
    """

    active = False

    def check(self, grammar: Grammar) -> None:
        """Start to compile a request's grammar. Any thread may call this.

        Raises:
            UserError: the grammar cannot be used; always in this base class.
        """
        raise UserError(NO_GRAMMARS)

    def ready(self, request: Request) -> bool:
        """Return True if the grammar of a request is compiled; False: the engine asks again at the next step.

        Raises:
            UserError: the grammar cannot be compiled.
        """
        return True

    def wait_until_compiled(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled, or raise `UserError` if it cannot be used."""

    def begin(self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]) -> bool:
        """Start to compute the masks of a step whose earlier tokens are all known now.

        works: each the tokens of one request. sampled: for each request, its newest tokens, which are not
            appended to it yet.

        Returns:
            True if `fill_bitmask` will not have to wait for the masks.
        """
        return True

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the bit masks of allowed tokens for the samples of a step, in order.

        works: each the tokens of one request. Returns a `TokenBitmask` (on the device), or None if all tokens
        are allowed for all samples.
        """
        return None

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return the requests whose grammar raised an error since the last call, each with the error."""
        return []


NO_DRAFTS = Drafter()
NO_GRAMMAR_MANAGER = GrammarManager()
SEQUENTIAL_LOOP = SequentialLoop()
