"""Speculative decoding on one page: propose, verify, accept, roll back.

The words are those of Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318). A drafter *proposes*
K draft tokens behind a request's newest token. One step of the target model computes all K + 1 of them
(*verify*), and samples in every place with the random number that this place has without drafts. So a draft
is right if it is what was sampled in its place, and drafts are *accepted* up to the first that is not; the
token sampled there is kept, too. Then the scheduler *rolls back*: `num_computed_tokens` ends behind what was
accepted (`Scheduler.finish_steps`), and later tokens are written over the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from common.request import Request
from continuous.engine import Engine
from continuous.rows import write
from continuous.runner import OutputVerifier, Results, Token
from continuous.work import Work
from speculative.control import DraftController
from speculative.loops import HostDrafter
from speculative.stats import SpeculationStats
from speculative.throttle import DraftThrottle

# Propose.


class Proposer:
    """Guesses tokens. One object serves all requests of an engine.

    watches: it has to see every step of a request, from its prompt on, or guesses badly.
    accept: drafts a step that count as right by decree, if any do.
    """

    watches = False
    accept: float | None = None

    def guess(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return for each request at most so many tokens that may follow its `tokens`, all of them known."""
        raise NotImplementedError

    def attach(self, engine: Engine) -> None:
        """Meet the engine that it guesses for."""

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Learn from a step; its hidden states are in `runner.last` until the next one."""

    def leave(self, request: Request) -> None:
        """Forget a request that has ended (it has a finish reason) or is preempted."""


class SpeculativeRunner(HostDrafter):
    """Asks a source for as many guesses as pay: for all requests at once, before a step is scheduled.

    Args:
        source: of the guesses.
        control: when to guess, and how far.
        clock: in seconds; replaced by tests.

    guesses: those of the next step. stats: what came of them.
    """

    def __init__(
        self,
        source: Proposer,
        control: DraftController,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source, self.control = source, control
        self.throttle = DraftThrottle(control, clock, watches=source.watches)
        self.stats = SpeculationStats(synthetic=source.accept)
        self.guesses: dict[Request, Sequence[int]] = {}

    def attach(self, engine: Engine) -> None:
        """Meet the engine whose steps these are."""
        self.throttle.attach(engine)
        self.source.attach(engine)

    @property
    def needs_finished_step(self) -> bool:
        """While it guesses, it has to know every token."""
        return self.throttle.on

    def begin(self, running: Sequence[Request]) -> bool:
        """Guess for all whose tokens are known, as far as it pays."""
        self.guesses.clear()
        asked = []
        for request, length in zip(running, self.throttle.lengths(running), strict=True):
            room = min(
                length, request.limit - len(request.tokens) - 1
            )  # one token is sampled in any case
            busy = request.placeholders or request.prefilling or request.siblings
            if room > 0 and not (busy or request.params.penalized):
                asked.append((request, room))
        if asked:
            requests, lengths = zip(*asked, strict=True)
            guesses = self.source.guess(requests, lengths)
            self.guesses |= {
                r: made[:most] for (r, most), made in zip(asked, guesses, strict=True)
            }
        return bool(asked)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return what was guessed for it, cut to what there is room for."""
        return self.guesses.get(request, ())[:most]

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Learn from a work that had drafts, or that the source had to see."""
        if work.drafts or self.needs_finished_step:
            self.count(work, accepted)
            self.source.on_step_finished(work, accepted)

    def count(self, work: Work, accepted: int) -> None:
        """Learn what a step cost, and what became of its drafts."""
        self.throttle.saw(work, accepted)
        if work.drafts:
            self.stats.count(work, accepted)
            if work.request.finish_reason is None:  # or the end cut it short, and says nothing
                self.control.saw(work.request, len(work.drafts), accepted)

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self.guesses.pop(request, None)
        self.control.leave(request)
        self.source.leave(request)
        self.throttle.left()


# Verify.

Agree = Callable[[Sequence[int], Sequence[int]], int]
"""Counts the drafts that are right, given what was sampled in their places and behind them."""


def agreeing(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """Count the first drafts that are what was sampled in their places, which is the truth."""
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return right


class Verifier(OutputVerifier):
    """Lets a work with drafts yield several tokens.

    tokens: `[R, max_len]` int64, the rows of the engine.
    agree: says which drafts are right; replacing it changes the text.
    """

    def __init__(self, tokens: Tensor, agree: Agree = agreeing) -> None:
        self.tokens, self.agree = tokens, agree

    def write(self, works: Sequence[Work]) -> None:
        """Write the drafts behind the newest tokens of their rows, where the step reads its inputs."""
        ends = ((work, work.start + work.count) for work in works if work.drafts)
        lines = [(work.row, end - len(work.drafts), work.drafts) for work, end in ends]
        if lines:
            write(self.tokens, lines)

    # Accept.

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        """Return for each taker the drafts that are right, and the token sampled behind the last of these."""
        if not any(work.drafts for work in works):
            return super().accepted(works, tokens)
        return list(self._accepted(works, iter(tokens)))

    def _accepted(
        self, works: Sequence[Work], tokens: Iterator[Token]
    ) -> Iterator[list[Token]]:
        for work in works:
            for _ in work.sampled_requests:
                sampled = list(islice(tokens, len(work.drafts) + 1))
                right = (
                    self.agree([token for token, _ in sampled], work.drafts)
                    if work.drafts
                    else 0
                )
                yield sampled[: right + 1]


def verify(engine: Engine) -> Verifier:
    """Make an engine verify drafts; return what does."""
    found = engine.runner.verifier
    if not isinstance(found, Verifier):
        engine.runner.verifier = found = Verifier(engine.scheduler.rows.tokens)
    return found
