"""The scheduler: before every step it decides which requests take part and how many tokens each computes.

Batches are made anew at every step, not once for many (Orca, Yu et al., OSDI 2022): a request joins as soon
as there is room and leaves the moment it ends.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import NamedTuple

from common.errors import UserError, integer
from common.request import Request
from continuous.cache import CacheManager
from continuous.policies import Policy, fcfs
from continuous.rows import Rows


class Work(NamedTuple):
    """A request's part of one step, as it was decided. It stays true whatever happens to the request later.

    start, count: which tokens to compute, `start .. start + count - 1`, in row `row`.
    drafts: guessed tokens among them (speculative decoding), at the end.
    takers: who takes a token sampled from the last one's logits: nobody in the middle of a prompt, then the
        request itself, and after a shared prompt its siblings too.
    """

    request: Request
    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    drafts: tuple[int, ...] = ()
    takers: tuple[Request, ...] = ()


class Scheduler:
    """Iteration-level scheduling of whole prompts and decodes, as many as `step_tokens` and the cache allow.

    There is one rule: let `num_computed_tokens` catch up with the tokens there are. A prompt is far behind, a
    decode is one behind. Later phases change the hooks: `order`, `yields`, `share`, `make_room`, `fork`.

    Args:
        rows: who runs, at most `rows.count` at a time.
        cache: where their keys and values go.
        step_tokens: most tokens that one step computes.
        policy: who is served first.
    """

    def __init__(self, rows: Rows, cache: CacheManager, *, step_tokens: int, policy: Policy = fcfs) -> None:
        self.rows, self.cache, self.policy = rows, cache, policy
        self.step_tokens = integer("step_tokens", step_tokens, low=1)
        self.running: list[Request] = []  # by rank
        self._waiting: list[tuple[tuple[float, ...], Request]] = []  # a heap by rank
        self.preemptions = 0

    def check(self, requests: list[Request]) -> None:
        """Raise `UserError` if the samples of one prompt would wait for ever."""
        self.check_step(requests[0])
        most = requests[0].limit - 1  # the last token is never computed
        if not self.cache.holds(most):
            raise UserError(
                f"the request may need {most} tokens of cache, but the cache cannot hold as many for one "
                "request; lower max_tokens or enlarge the cache"
            )

    def check_step(self, request: Request) -> None:
        """Raise `UserError` if the request needs more tokens in one step than a step has."""
        if request.prompt_len > self.step_tokens:
            raise UserError(
                f"the prompt has {request.prompt_len} tokens, but a step computes a whole prompt and at most "
                f"step_tokens, {self.step_tokens}"
            )

    def add(self, requests: list[Request]) -> None:
        """Put the samples of one prompt in line, each by itself: rows share nothing."""
        for request in requests:
            request.rank = self.policy(request)
            self._push(request)

    @property
    def waiting(self) -> list[Request]:
        """The waiting line, in no particular order."""
        return [request for _, request in self._waiting if request.finish_reason is None]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and self._head() is None

    def schedule(self) -> list[Work]:
        """Decide the next step. Its works count as computed from here on, so call it once a step."""
        works: list[Work] = []
        budget = self.step_tokens
        queue, at = self.order(self.running), 0
        preempted = False
        while at < len(queue):
            request = queue[at]
            if not preempted and self.yields(request):
                budget = self._admit(works, budget)
            at += 1
            count = self.share(request, budget)
            if count == 0:
                continue
            if not self.cache.reserve(request, request.num_computed_tokens + count):
                preempted = True
                if not self.make_room(request, request.num_computed_tokens + count, queue, at):
                    continue
            works.append(self._take(request, count))
            budget -= count
        if not preempted:  # or the newcomer would take the room that its victim has just lost
            self._admit(works, budget)
        return works

    def _admit(self, works: list[Work], budget: int) -> int:
        """Let requests in from the head of the line while there is room; returns what is left of the budget.

        Nobody overtakes the head.
        """
        while budget > 0:
            request = self._head()
            if request is None or request.in_flight or not self.admits(request):
                break
            request.num_computed_tokens = request.cached_tokens = self.cache.lookup(request)
            count = self.share(request, budget)
            if count == 0:
                request.num_computed_tokens = 0
                break
            heapq.heappop(self._waiting)
            self.enter(request)
            insort(self.running, request, key=_rank)
            works.append(self._take(request, count))
            budget -= count
        return budget

    def _take(self, request: Request, count: int) -> Work:
        """Write down one work and advance the request by it."""
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + count
        if end < len(request.tokens) + request.placeholders:
            request.in_flight += 1
            return Work(request, request.row, start, count)
        takers = self.fork(request) if request.siblings else (request,)
        for taker in takers:
            taker.in_flight += 1
            taker.placeholders += 1
        return Work(request, request.row, start, count, (), takers)

    # Hooks.

    def order(self, running: list[Request]) -> list[Request]:
        """A new list of the running requests in the order in which they are served."""
        return running.copy()

    def yields(self, request: Request) -> bool:
        """Whether the waiting line goes before this running request."""
        return False

    def share(self, request: Request, budget: int) -> int:
        """How many tokens of `request` to compute now, at most `budget`: all it is behind, or none."""
        known = len(request.tokens) + request.placeholders
        count = known - request.num_computed_tokens
        # A request whose last allowed token is on its way has nothing left to compute.
        return count if count <= budget and known < request.limit else 0

    def make_room(self, request: Request, upto: int, queue: list[Request], at: int) -> bool:
        """Reserve by taking room from the requests `queue[at:]`, which this step does not serve yet."""
        return False

    def admits(self, request: Request) -> bool:
        """Whether there is a row and room for `request`."""
        return self.rows.free > 0 and self.cache.fits(request)

    def enter(self, request: Request) -> None:
        """Give an admitted request its row and its room."""
        self.rows.acquire(request)
        if not self.cache.reserve(request, len(request.tokens)):
            raise AssertionError("the cache refused what it said would fit")

    def fork(self, request: Request) -> tuple[Request, ...]:
        """Let the siblings of `request`, whose prompt this step completes, run beside it; all of them."""
        raise NotImplementedError("this cache does not share prompts")

    # What comes back from a step.

    def land(self, work: Work, *, computed: bool = True) -> None:
        """The host has seen the end of one work's step; `computed` is False if the step failed."""
        for request in work.takers or (work.request,):
            request.in_flight -= 1
            request.placeholders -= bool(work.takers)
            if computed and request.row >= 0:  # not finished, aborted or preempted meanwhile
                self.cache.commit(request, work.start + work.count)

    def leave(self, request: Request) -> None:
        """Take back what a request holds: it has finished, or it is preempted."""
        if request.row >= 0:
            self.running.remove(request)
            self.cache.release(request)
            self.rows.release(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back in line; all its tokens will be computed again, the output included."""
        self.leave(request)
        request.num_computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self._push(request)

    def _push(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.rank, request))

    def _head(self) -> Request | None:
        """The first in line; requests that ended while they waited are dropped on the way."""
        while self._waiting:
            request = self._waiting[0][1]
            if request.finish_reason is None:
                return request
            heapq.heappop(self._waiting)
        return None


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank
