"""The work of one step for one request."""

from __future__ import annotations

from typing import NamedTuple

from common.request import Request


class Work(NamedTuple):
    """A request's part of one step, as it was decided. It stays true whatever happens to the request later.

    start, count: which tokens to compute, `start .. start + count - 1`, in row `row`.
    drafts: guessed tokens among them, at the end; only a work with one taker has any.
    certain: whether these drafts cannot be wrong, so that the next step may be scheduled behind them.
    takers: requests that take what is sampled from the last one's logits: none in the middle of a
        prompt, then the request itself, and after a shared prompt its siblings too.
    """

    request: Request
    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    drafts: tuple[int, ...] = ()
    sampled_requests: tuple[Request, ...] = ()
    drafts_forced: bool = False

    @property
    def placeholders(self) -> int:
        """Tokens that each taker will have got when this has landed, as far as one can count on them."""
        return len(self.drafts) + 1 if self.drafts_forced else bool(self.sampled_requests)
