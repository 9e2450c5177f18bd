"""The scheduler: before every step it decides which requests take part and how many tokens each computes.

Batches are made anew at every step, not once for many (Orca, Yu et al., OSDI 2022): a request enters as soon
as there is room and leaves when it ends.
"""

from __future__ import annotations

import heapq
from bisect import insort

from common.errors import UserError, integer
from common.request import Request
from continuous.cache import CacheManager
from continuous.policies import Policy, by_rank, fcfs
from continuous.rows import RequestRows
from continuous.seams import NO_DRAFTS, Drafter
from continuous.work import Work


class Scheduler:
    """Iteration-level scheduling of whole prompts and decodes, as many as `step_tokens` and the cache allow.

    There is one rule: let `num_computed_tokens` catch up with the tokens there are. A prompt is far
    behind, a decode is one behind. Later phases override the hooks below.

    Args:
        rows: one for each request that runs, at most `rows.count` at a time.
        cache: where their keys and values go.
        step_tokens: most tokens that one step computes.
        policy: which request is served first.
        drafter: guesses tokens to be verified. With one that does, attention must take several queries of
            a request with a past; this phase's takes one.
    """

    preemptions = 0  # a later phase sends requests back in line

    def __init__(
        self,
        rows: RequestRows,
        cache: CacheManager,
        *,
        step_tokens: int,
        policy: Policy = fcfs,
        drafter: Drafter = NO_DRAFTS,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.policy = policy
        self.drafter = drafter
        self.step_tokens = integer("step_tokens", step_tokens, low=1)
        self.running: list[Request] = []  # by rank
        self._waiting: list[tuple[tuple[float, ...], Request]] = []  # a heap by rank

    def check(self, prompt_len: int, limit: int) -> None:
        """Raise `UserError` if a request could never be scheduled: its tokens fit no step, or not the cache.

        prompt_len: tokens of its prompt. limit: most tokens that it may have, prompt and output.
        """
        self.check_step(prompt_len, limit)
        most = limit - 1  # the last token is never computed
        if not self.cache.holds(most):
            raise UserError(
                f"the request may need {most} tokens of cache, but the cache cannot hold as many for one "
                "request; lower max_tokens or enlarge the cache"
            )

    def check_step(self, prompt_len: int, limit: int) -> None:
        """Raise `UserError` if such a request needs more tokens in one step than a step has."""
        if prompt_len > self.step_tokens:
            raise UserError(
                f"the prompt has {prompt_len} tokens, but a step computes a whole prompt and at most "
                f"step_tokens, {self.step_tokens}"
            )

    def add(self, requests: list[Request]) -> None:
        """Add the samples of one prompt to the waiting queue; each computes the prompt for itself."""
        for request in requests:
            request.rank = self.policy(request)
            self._push(request)

    @property
    def waiting(self) -> list[Request]:
        """Return the waiting requests, in no particular order."""
        return [request for _, request in self._waiting if request.finish_reason is None]

    @property
    def idle(self) -> bool:
        """Return True if no request runs or waits."""
        return not self.running and self._head() is None

    def schedule(self) -> list[Work]:
        """Decide the next step, and return its works (each: the tokens of one request). Call it once a step.

        The works count as computed from here on. First come the running requests in their `order`, each with
        its `num_new_tokens` of what is left of the budget, `step_tokens`, drafts included. The waiting line
        follows, from its head (`_admit_waiting`). On the way:

        - A request that `should_yield` is served after those of the waiting line that rank before it
          (`_admit_waiting` with `before`), unless this step has preempted.
        - Room is reserved for all that is computed, and before the work is taken. A request for which the
          cache has none may take memory from those after it in the queue, which this step has not served yet
          (`preempt_for` removes its victims from the queue). That step has preempted, whether room was
          found or not, and admits no request afterwards: it would take what the victim has just lost.
        - The drafter is asked once a step whether it guesses at all (`begin`). A request whose room was there
          at once may have drafts (`_drafts`), within what the budget holds after its share and what is
          `reserved_for_decodes` for the requests behind it.
        """
        works: list[Work] = []
        budget = self.step_tokens
        queue, at = self.order(self.running), 0
        drafting = self.drafter.begin(self.running)
        preempted = False
        while at < len(queue):
            request = queue[at]
            if not preempted and self.should_yield(request):
                budget = self._admit_waiting(works, budget, before=request.rank)
            at += 1
            count = self.num_new_tokens(request, budget)
            if count == 0:
                continue
            end = request.num_computed_tokens + count
            drafts: tuple[int, ...] = ()
            if not self.cache.reserve(request, end):
                preempted = True
                if not self.preempt_for(request, end, queue, at):
                    continue
            elif drafting:
                drafts = self._drafts(
                    request, end, budget - count - self.reserved_for_decodes(len(queue) - at)
                )
            works.append(self._schedule_request(request, count, drafts))
            budget -= count + len(drafts)
        if not preempted:  # or the newcomer would take the room that its victim has just lost
            self._admit_waiting(works, budget)
        return works

    def _admit_waiting(
        self, works: list[Work], budget: int, before: tuple[float, ...] | None = None
    ) -> int:
        """Admit requests from the head of the waiting queue while there is room; schedule their first tokens.

        works: gets their works. budget: tokens of the step that are left. before: only requests of a smaller
            rank are admitted; None: all. No request overtakes the head, and one with a step in flight waits.
            An admitted one has as many `num_computed_tokens` and `cached_tokens` as the cache has (`lookup`).

        Returns:
            What is left of the budget.
        """
        while budget > 0:
            request = self._head()
            if request is None or request.in_flight or not self.can_admit(request):
                break
            if before is not None and request.rank >= before:
                break
            request.num_computed_tokens = request.cached_tokens = self.cache.lookup(request)
            count = self.num_new_tokens(request, budget)
            if count == 0:
                request.num_computed_tokens = 0
                break
            heapq.heappop(self._waiting)
            self.start_request(request)
            insort(self.running, request, key=by_rank)
            works.append(self._schedule_request(request, count))
            budget -= count
        return budget

    def _drafts(self, request: Request, end: int, budget: int) -> tuple[int, ...]:
        """Return drafts after a request's newest token, which this step computes, and reserve cache for them.

        There are none if the cache has no room (no request is preempted for a draft), for a request whose
        siblings wait for its prompt, and with penalties, which count all tokens before a position.

        end: tokens of the request with the newest one. budget: tokens of the step that are left for drafts.
        """
        newest = len(request.tokens) + request.placeholders
        if end != newest or request.prefilling or request.siblings or request.params.penalized:
            return ()
        most = min(budget, request.limit - end - 1)  # one token is sampled in any case
        drafts = tuple(self.drafter.propose(request, most)) if most > 0 else ()
        return drafts if drafts and self.cache.reserve(request, end + len(drafts)) else ()

    def _schedule_request(
        self, request: Request, count: int, drafts: tuple[int, ...] = ()
    ) -> Work:
        """Return a work of `count` tokens of a request and its drafts, and advance the request by both.

        A work that ends before the newest token, known or placeholder, samples no token: the request has one
        more step in flight. One that reaches it has sampled requests: the request itself, or what `fork`
        returns where siblings wait for its prompt. Each of these has one more step in flight and one more
        placeholder. Drafts after a placeholder are `drafts_forced`: then each of them is a placeholder, too.
        """
        start = request.num_computed_tokens
        request.num_computed_tokens = end = start + count + len(drafts)
        if end < len(request.tokens) + request.placeholders:
            request.in_flight += 1
            return Work(request, request.row, start, count)
        sampled_requests = self.fork(request) if request.siblings else (request,)
        drafts_forced = bool(drafts and request.placeholders)
        for sampled_request in sampled_requests:
            sampled_request.in_flight += 1
            sampled_request.placeholders += len(drafts) + 1 if drafts_forced else 1
        return Work(
            request,
            request.row,
            start,
            count + len(drafts),
            drafts,
            sampled_requests,
            drafts_forced,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the cache's counts contradict each other."""
        self.cache.check()

    # Hooks.

    def order(self, running: list[Request]) -> list[Request]:
        """Return a new list of the running requests in the order in which they are scheduled."""
        return running.copy()

    def reserved_for_decodes(self, later: int) -> int:
        """Return the tokens that drafts may not use: one for each of `later` requests to be scheduled."""
        return later

    def should_yield(self, request: Request) -> bool:
        """Return True if waiting requests of a smaller rank go before this running request."""
        return False

    def num_new_tokens(self, request: Request, budget: int) -> int:
        """Return how many tokens of `request` this step computes: all that are not computed yet, or 0.

        Placeholders (tokens that are being sampled) count as well. It is 0 if these are more than `budget`,
        the tokens left in the step; if the last allowed token (`limit`) is known or being sampled, since
        nothing is computed after that; and for a request whose drafts are being verified.
        """
        known = len(request.tokens) + request.placeholders
        count = known - request.num_computed_tokens
        return count if 0 < count <= budget and known < request.limit else 0

    def preempt_for(self, request: Request, upto: int, queue: list[Request], at: int) -> bool:
        """Reserve cache for the first `upto` tokens of `request` by preempting requests of `queue[at:]`.

        These requests are not served yet in this step, and a preempted one is removed from the queue. Returns
        False if there is still no room; then `request` may be preempted itself. Here: preempt none.
        """
        return False

    def can_admit(self, request: Request) -> bool:
        """Return True if there are cache memory for a waiting request, and rows for it and its siblings.

        Siblings get their rows at once, or a fork might find none.
        """
        return self.rows.free > len(request.siblings) and self.cache.fits(request)

    def start_request(self, request: Request) -> None:
        """Give an admitted request a free row (slot) of `rows`, and reserve cache memory for its tokens."""
        self.rows.acquire(request)
        if not self.cache.reserve(request, len(request.tokens)):
            raise AssertionError("the cache refused what it said would fit")

    def fork(self, request: Request) -> tuple[Request, ...]:
        """Start the siblings of `request`, whose prompt this step completes.

        Returns:
            The sampled requests of the step: `request` and its siblings, but for those that have ended. Each
            has a row, stands in `running` by its rank, counts as many computed tokens as `request`, and
            shares its cache. `request` has no siblings left.
        """
        raise NotImplementedError("this cache does not share prompts")

    # What comes back from a step.

    def finish_step(self, work: Work, *, accepted: int = 0, computed: bool = True) -> None:
        """Record that a scheduled step has completed for one request, after its tokens were appended.

        Called once for every work (the request's tokens in the step), in order, whatever became of its
        requests. For each sampled request, the step in flight and its placeholders are subtracted, and the
        computed tokens are committed to the cache; siblings share blocks, but each commits its own.

        accepted: number of drafts that the model confirmed; tokens computed from the others do not count.
        computed: False if the step failed.
        """
        end = work.start + work.count - len(work.drafts) + accepted
        gained = len(work.drafts) + 1 if work.drafts_forced else bool(work.sampled_requests)
        for request in work.sampled_requests or (work.request,):
            request.in_flight -= 1
            request.placeholders -= gained
            if computed and request.row >= 0:  # not finished, aborted or preempted meanwhile
                if work.drafts and not work.drafts_forced:
                    request.num_computed_tokens = end
                self.cache.commit(request, end)
        if computed:
            self.drafter.on_step_finished(work, accepted)

    def leave(self, request: Request) -> None:
        """Free the cache memory and the row of a request that has finished or is preempted, if it has a row.

        The drafter is called first (`leave`), and the row is freed last: the cache needs it to find memory.
        """
        if request.row >= 0:
            self.drafter.leave(request)
            self.running.remove(request)
            self.cache.release(request)
            self.rows.release(request)

    def _push(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.rank, request))

    def _head(self) -> Request | None:
        """Return the first waiting request, or None; drop requests that have ended while they waited."""
        while self._waiting:
            request = self._waiting[0][1]
            if request.finish_reason is None:
                return request
            heapq.heappop(self._waiting)
        return None
