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
        """Raise `UserError` if a request's prompt and output could exceed the tokens of one step.

        A preempted request computes its prompt and its output so far in one step.
        """
        if limit - 1 > self.step_tokens:
            raise UserError(
                f"the request may have to compute {limit - 1} tokens at once after a preemption, but "
                f"a step computes at most step_tokens, {self.step_tokens}"
            )

    def add(self, requests: list[Request]) -> None:
        """Add the samples of one prompt to the waiting queue together; the first computes the prompt for all.

        If there are more samples than rows, they are added in parts of as many as there are rows.
        """
        for request in requests:
            request.rank = self.policy(request)
        for at in range(0, len(requests), self.rows.count):
            first, *first.siblings = requests[at : at + self.rows.count]
            self._push(first)

    def preempt_for(self, request: Request, upto: int, queue: list[Request], at: int) -> bool:
        """Preempt the last request by rank until `request` has room; it may be `request` itself.

        upto: tokens that it needs room for. queue, at: only the requests `queue[at:]`, not yet served in this
            step, can lose their blocks; they leave `queue`. They are not always in the order of ranks.

        Returns:
            False if there is still no room.
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
        """Allocate rows for all samples of a prompt, and blocks for the first; drop aborted samples."""
        super().start_request(request)
        request.siblings = [each for each in request.siblings if each.finish_reason is None]
        for sibling in request.siblings:
            self.rows.acquire(sibling)

    def fork(self, request: Request) -> tuple[Request, ...]:
        """Start the siblings of `request`, whose prompt this step completes, on its blocks; return all.

        Its last logits are sampled once for each. All earlier chunks of the prompt have finished: if one
        failed after the fork, the siblings would go on with what was never computed.
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

        Before the fork, siblings have rows but do not run; they leave with the first sample, or alone.
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
