"""Speculative decoding on one page: propose, verify, accept, roll back.

The words are those of Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318). A drafter *proposes*
K draft tokens behind a request's newest token. One step of the target model computes all K + 1 of them
(*verify*), and samples in every place with the random number that this place has without drafts. So a draft
is right if it is what was sampled in its place, and drafts are *accepted* up to the first that is not; the
token sampled there is kept, too. Then the scheduler *rolls back*: `num_computed_tokens` ends behind what was
accepted (`Scheduler.finish_step`), and later tokens are written over the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from common.request import Request
from continuous.engine import Engine
from continuous.rows import write
from continuous.runner import OutputVerifier, Results, Token
from continuous.work import Work
from cuda_graphs.overlap import WaitingDrafter
from speculative.control import DraftController, is_drafted
from speculative.stats import SpeculationStats

if TYPE_CHECKING:
    from speculative.proposer import Proposer

# Propose.

Agree = Callable[[Sequence[int], Sequence[int]], int]
"""Counts the accepted drafts, given the tokens sampled at their positions and behind the last one."""


def agreeing(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """Return the number of drafts before the first that differs from the token sampled at its position."""
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return right


REHEARSED = 8
"""Requests of a batch, at most, whose drafts are rehearsed."""


class SpeculativeRunner(WaitingDrafter):
    """The engine's drafter: guesses for all requests at once, before a step is scheduled, if that is faster.

    Args:
        source: makes the drafts.
        most: most drafts of a request in a step.
        adaptive: False: always `most` drafts, whatever they cost.
        clock: returns seconds; replaced by tests.

    guesses: drafts of the next step, by request. stats: how many earlier drafts were accepted.
    """

    def __init__(
        self,
        source: Proposer,
        most: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source, self.most = source, most
        self.control = DraftController(
            most,
            adaptive=adaptive,
            watches=source.watches,
            rehearses=source.rehearses,
            clock=clock,
        )
        self.stats = SpeculationStats()
        self.guesses: dict[Request, Sequence[int]] = {}
        self._rehearsed: dict[Request, tuple[int, Sequence[int]]] = {}

    @property
    def needs_finished_step(self) -> bool:
        """Return True while all tokens must be on the host before a step is scheduled."""
        return self.control.on

    def attach(self, engine: Engine) -> None:
        """Store the engine whose requests get drafts, in the controller and in the proposer of drafts."""
        self.control.attach(engine)
        self.source.attach(engine)

    def begin(self, running: Sequence[Request]) -> bool:
        """Make drafts for all running requests whose tokens are known; return True if there are any."""
        self.guesses = {}
        lengths = self.control.decide(running)
        if lengths is None:
            if self.source.rehearses and running:
                self._rehearse(running[self.control.steps % min(len(running), REHEARSED)])
            return False
        asked = []
        for request, length in zip(running, lengths, strict=True):
            if length and not request.placeholders and is_drafted(request):
                # One token is sampled in any case.
                asked.append((request, min(length, request.limit - len(request.tokens) - 1)))
        if not asked:
            return False
        requests, wanted = zip(*asked, strict=True)
        guesses = self.source.guess(requests, wanted)
        for request, most, made in zip(requests, wanted, guesses, strict=True):
            if made is not None:
                self.guesses[request] = made[:most]
                if not made:
                    self.control.add_tries(request, 0, 0)
        if not self.control.is_gain(self.guesses, len(running)):
            self.guesses = {}
        return any(self.guesses.values())

    def _rehearse(self, request: Request) -> None:
        """Compare a request's earlier guesses with the tokens that were sampled, and guess again."""
        known, drafts = self._rehearsed.get(request, (0, ()))
        came = request.tokens[known:]
        if not (came and is_drafted(request)):
            return
        if known:
            tried = drafts[: len(came)]
            self.control.add_tries(request, len(tried), agreeing(came, tried))
        (made,) = self.source.guess([request], [self.most])
        if made is not None:
            self._rehearsed[request] = len(request.tokens), made

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` drafts of a request for the step that is being scheduled."""
        return self.guesses.get(request, ())[:most]

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Count a request's accepted drafts of a finished step, and let the proposer learn from the step.

        work: the request's tokens in the step. accepted: how many of its drafts the model confirmed.
        """
        if not (self.needs_finished_step or work.drafts):
            return
        self.control.add_work(work)
        if work.drafts:
            self.stats.count(work, accepted)
            if work.request.finish_reason is None:  # or the end cut it short, and says nothing
                self.control.add_tries(work.request, len(work.drafts), accepted)
        self.source.on_step_finished(work, accepted)

    def leave(self, request: Request) -> None:
        """Drop the drafts and counts of a request that has ended or is preempted."""
        self.guesses.pop(request, None)
        self._rehearsed.pop(request, None)
        self.control.leave(request)
        self.source.leave(request)


# Verify.


class Verifier(OutputVerifier):
    """Decides which sampled tokens a request with drafts gets: the accepted drafts, and one more.

    tokens: `[R, max_len]` int64 on the device, the token ids of the engine's requests.
    agree: returns how many drafts are accepted, given the sampled tokens and the drafts.
    """

    def __init__(self, tokens: Tensor, agree: Agree = agreeing) -> None:
        self.tokens, self.agree = tokens, agree

    def write(self, works: Sequence[Work]) -> None:
        """Write the drafts of a step's works, its inputs, after the newest tokens of the requests' rows."""
        lines = []
        for work in works:
            if drafts := work.drafts:
                lines.append((work.row, work.start + work.count - len(drafts), drafts))
        if lines:
            write(self.tokens, lines)

    # Accept.

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        """Return for each sampled request of the works its accepted drafts, and the token sampled after them.

        tokens: all samples of the step, at each draft and after the last.
        """
        if not any(map(attrgetter("drafts"), works)):
            return super().accepted(works, tokens)
        return list(self._accepted(works, iter(tokens)))

    def _accepted(
        self, works: Sequence[Work], tokens: Iterator[Token]
    ) -> Iterator[list[Token]]:
        for work in works:
            for _ in work.sampled_requests:
                sampled = list(islice(tokens, len(work.drafts) + 1))
                right = 0
                if work.drafts:
                    right = self.agree([token for token, _ in sampled], work.drafts)
                yield sampled[: right + 1]
