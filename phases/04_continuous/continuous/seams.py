"""Places where a later phase takes part in a step, and what stands there in this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from common.errors import UserError
from common.request import Request
from common.rules import NO_GRAMMARS
from common.sampling.params import SamplingParams
from common.sampling.sampler import TokenBitmask
from continuous.runner import Results
from continuous.work import Work

if TYPE_CHECKING:
    from continuous.engine import Engine


class Drafter:
    """Guesses the next tokens of a request, to be verified in the step that computes its newest one.

    This one guesses nothing; a later phase's begins and proposes.
    """

    def begin(self, running: Sequence[Request]) -> bool:
        """A step is about to be scheduled; returns whether `propose` is to be called in it."""
        return False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most `most` token ids that may follow what the request has; none is always right.

        Where the newest token is still on its way (`Request.placeholders`), drafts follow that one and must
        be certain.
        """
        return ()

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """A step has ended well for a work, and `accepted` of its drafts were right."""

    def leave(self, request: Request) -> None:
        """A request gives back its row: it has ended, or it is preempted."""


class Loop(Protocol):
    """Advances an engine, step by step; it keeps what is under way."""

    @property
    def idle(self) -> bool:
        """True if nothing is in flight."""

    def advance(self, engine: Engine) -> None:
        """Launch the next step, and collect what is due."""

    def finish_steps(self, engine: Engine) -> None:
        """Collect all that is under way."""


class SequentialLoop:
    """A `Loop` that waits for each step before it schedules the next."""

    idle = True

    def advance(self, engine: Engine) -> None:
        """Launch a step, and collect it."""
        pending = engine.launch(engine.schedule())
        if pending is not None:
            engine.collect(pending)

    def finish_steps(self, engine: Engine) -> None:
        """Nothing is under way."""


class EngineObserver:
    """Hears what happens in an engine, in order. This one forgets it; a later phase sends it elsewhere."""

    def on_requests_added(self, requests: Sequence[Request]) -> None:
        """The samples of a prompt stand in line."""

    def on_request_aborted(self, request: Request) -> None:
        """A request is aborted."""

    def on_step_scheduled(self, works: Sequence[Work]) -> None:
        """A step has been decided."""

    def on_step_finished(self, works: Sequence[Work], results: Results) -> None:
        """The tokens of a step have come."""

    def on_step_failed(self, error: BaseException) -> None:
        """A step has failed, and its requests have ended."""


class GrammarManager(Protocol):
    """Says which tokens may be chosen, between the two halves of a step; by itself, that every token may.

    A request whose grammar takes time waits outside of the line, so that no other request waits with it.
    """

    def check(self, params: SamplingParams) -> None:
        """Begin whatever these settings need. Any thread may call it.

        Raises:
            UserError: they ask for what there is not.
        """
        if params.grammar is not None:
            raise UserError(NO_GRAMMARS)

    def ready(self, request: Request) -> bool:
        """Return True if a request may wait in line; else the scheduler asks again at every step.

        Raises:
            UserError: it never will.
        """
        return True

    def wait_until_compiled(self, params: SamplingParams) -> None:
        """Wait until all that `check` has begun is done. Raises `UserError` if that cannot be used."""
        return None

    def needs_mask(self, works: Sequence[Work]) -> bool:
        """Return True if a sampled request of these works is constrained.

        Then `fill_bitmask` must know all tokens before this step.
        """
        return False

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the masks that `Sampler.sample` takes for the samples of the step, in order."""
        return None

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar has failed since the last call, and why."""
        return []


class NoGrammarManager(GrammarManager):
    """`GrammarManager` for an engine in which every token may be chosen."""


NO_DRAFTS = Drafter()
NO_GRAMMAR_MANAGER = NoGrammarManager()
