"""The scheduler over a paged cache: it preempts when blocks run out, and samples share a prompt's blocks."""

from __future__ import annotations

from bisect import insort

from common.errors import UserError
from common.request import Request
from continuous.policies import by_rank
from continuous.scheduler import Scheduler
from paged_cache.cache import PagedCache


class PagedScheduler(Scheduler):
    """A scheduler that admits a request if its tokens so far fit into the free blocks, not all it may get.

    If blocks run out later, it preempts requests.
    """

    cache: PagedCache

    def check_step(self, prompt_len: int, limit: int) -> None:
        """Raise `UserError` if a request may need more tokens in one step than `step_tokens`.

        prompt_len: tokens of its prompt. limit: most tokens that it may have, prompt and output. A
        preempted request computes its prompt and its output so far in one step.
        """
        if limit - 1 > self.step_tokens:
            raise UserError(
                f"the request may have to compute {limit - 1} tokens at once after a preemption, but "
                f"a step computes at most step_tokens, {self.step_tokens}"
            )

    def add(self, requests: list[Request]) -> None:
        """Add the samples of one prompt to the waiting queue as one; the first computes the prompt for all.

        The others are its `siblings`. If there are more samples than rows (requests that may run), they are
        added in parts of as many as there are rows.
        """
        for request in requests:
            request.rank = self.policy(request)
        for at in range(0, len(requests), self.rows.count):
            first, *first.siblings = requests[at : at + self.rows.count]
            self._push(first)

    def preempt_for(self, request: Request, upto: int, queue: list[Request], at: int) -> bool:
        """Preempt the requests of the largest ranks until `request` has cache for its first `upto` tokens.

        queue: the running requests in the order of this step. Only `request` and `queue[at:]`, which this
            step has not served yet, can be preempted; a preempted one is removed. `queue` is not always
            sorted by rank.

        Returns:
            True if the cache is reserved. False if `request` had the largest rank and was preempted itself.
        """
        while True:
            victim = max((request, *queue[at:]), key=by_rank)
            self.preempt(victim)
            if victim is request:
                return False
            queue.remove(victim)
            if self.cache.reserve(request, upto):
                return True

    def preempt(self, request: Request) -> None:
        """Preempt a running request: free its blocks and row, and put it back in the waiting queue.

        It keeps its tokens and its rank; all its tokens, the output included, will be computed again. The
        preemption is counted for the request and for the scheduler.
        """
        self.leave(request)
        request.num_computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self._push(request)

    def start_request(self, request: Request) -> None:
        """Allocate rows for all samples of a prompt, and blocks for the first one, `request`.

        The other samples, its `siblings`, wait for it to compute the prompt; aborted ones are dropped.
        """
        super().start_request(request)
        request.siblings = [each for each in request.siblings if each.finish_reason is None]
        for sibling in request.siblings:
            self.rows.acquire(sibling)

    def fork(self, request: Request) -> tuple[Request, ...]:
        """Start the samples that wait for `request` to compute their prompt, which this step completes.

        They share the prompt's blocks. Returns `request` and these siblings, but for those that have ended:
        the prompt's last logits are sampled once for each. All earlier chunks of the prompt have finished:
        if one failed after the fork, the siblings would go on with keys that were never computed.
        """
        siblings = [sibling for sibling in request.siblings if sibling.finish_reason is None]
        request.siblings = []
        for sibling in siblings:
            self.cache.fork(request, sibling, request.num_computed_tokens)
            sibling.num_computed_tokens = sibling.cached_tokens = request.num_computed_tokens
            insort(self.running, sibling, key=by_rank)
        return (request, *siblings)

    def leave(self, request: Request) -> None:
        """Free the blocks and the row of a request that has ended or is preempted.

        Samples that wait for the request to compute their prompt have rows and do not run: their rows are
        freed with it. If one of these ends by itself, only its row is freed.
        """
        if request.row >= 0 and request.num_computed_tokens == 0:
            self.rows.release(request)
            return
        for sibling in request.siblings:
            if sibling.row >= 0:
                self.rows.release(sibling)
        super().leave(request)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a block's users are miscounted, or one is in use with no request left."""
        super().check_integrity()
        held = self.cache.allocator.count - self.cache.free
        if self.idle and held:
            raise AssertionError(f"idle, but {held} blocks are not free")
