"""A scheduler in which decodes and chunks of prompts share one token budget in each step.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024
(arXiv 2403.02310). A whole prompt in one step makes all other requests wait for it; a chunk much less.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from common.errors import UserError
from common.request import Request
from continuous.policies import by_rank
from continuous.rows import RequestRows
from paged_cache.cache import PagedCache
from paged_cache.scheduler import PagedScheduler


class ChunkedScheduler(PagedScheduler):
    """Schedules decodes first, then prompts with what is left of the budget `step_tokens`.

    Neither side can starve the other. While a prompt is waiting for its turn, a quarter of the budget is
    reserved for prompts; if that leaves too little for all decodes, they take turns.

    Args:
        rows: the slots of running requests. cache: block tables of their KV cache.
        chunk_tokens: most tokens of one prompt in a step; the whole budget by default. With less, several
            prompts advance side by side.
        options: those of `Scheduler`. `step_tokens`, the budget, bounds the time of a step and the gaps.
    """

    def __init__(
        self,
        rows: RequestRows,
        cache: PagedCache,
        *,
        chunk_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(rows, cache, **options)
        most = self.step_tokens
        if most < 2:
            raise UserError(
                f"step_tokens is {most}, but must be at least 2, one of them for prompts"
            )
        self.chunk_tokens = most if chunk_tokens is None else chunk_tokens
        self._decodes_left = self._kept = 0
        self._last_decode: tuple[float, ...] = ()

    def check_step(self, prompt_len: int, limit: int) -> None:
        """Accept a request of any length, and raise nothing: its prompt takes as many steps as it needs."""

    def order(self, running: list[Request]) -> list[Request]:
        """Return a new list of the running requests in the order of a step: decodes, then prompts, by rank.

        If the budget is too small for all decodes, those come first that had no turn in the last step.
        """
        prompts = [request for request in running if request.prefilling]
        decodes = running.copy()
        if prompts:
            decodes = [request for request in running if not request.prefilling]
        kept = max(1, self.step_tokens // 4)
        many = len(decodes) > self.step_tokens - kept
        self._kept = kept if prompts or self._newcomer() else 0
        self._decodes_left = self.step_tokens - (self._kept if many else 0)
        if len(decodes) > self._decodes_left:
            turn = bisect_right(decodes, self._last_decode, key=by_rank)
            decodes = decodes[turn:] + decodes[:turn]
            self._last_decode = decodes[self._decodes_left - 1].rank
        return decodes + prompts

    def reserved_for_decodes(self, later: int) -> int:
        """Return the tokens that drafts may not use: `later` for decodes, and the quarter for prompts."""
        return later + self._kept

    def _newcomer(self) -> bool:
        """Return True if a request waits and the first one of the queue could be admitted now."""
        head = self._head()
        return head is not None and not head.in_flight and self.can_admit(head)

    def should_yield(self, request: Request) -> bool:
        """Return True for a prompt that has begun, if a waiting request ranks before it and so goes first."""
        if not request.prefilling:
            return False
        head = self._head()
        return head is not None and head.rank < request.rank

    def num_new_tokens(self, request: Request, budget: int) -> int:
        """Return the number of tokens to schedule of a request, within `budget`: one, or a prompt's chunk."""
        known = len(request.tokens) + request.placeholders
        behind = known - request.num_computed_tokens
        # Drafts in flight may make it negative.
        count = max(0, min(behind, budget, self.chunk_tokens))
        if request.siblings and request.in_flight and count == behind:
            return 0  # they fork when all earlier chunks are known to be computed
        if behind == 1 and request.row >= 0:
            if self._decodes_left == 0 or known >= request.limit:
                return 0
            self._decodes_left -= 1
        return count
