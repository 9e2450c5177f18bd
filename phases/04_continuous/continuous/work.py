"""Work: one request's part of a step. Output: what a step returns for a request, a token or its end."""

from __future__ import annotations

from typing import NamedTuple

from common.events import FinishReason, Logprob
from common.request import Request


class Work(NamedTuple):
    """The tokens that one step computes for one request. It does not change, whatever happens to the request.

    row: the request's row at the time. start, count: the tokens to compute are those at positions
        `start .. start + count - 1`, drafts included.
    drafts: guessed tokens, the last of these; only a work with one sampled request has any.
    sampled_requests: requests that get a token sampled from the last token's logits: none in the middle of
        a prompt; at its end the request itself, and samples of the same prompt that waited for it; in later
        steps the request itself.
    drafts_forced: True if the drafts are certain to be accepted, so that the next step may be scheduled
        after them before this one has completed.
    """

    request: Request
    row: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    drafts: tuple[int, ...] = ()
    sampled_requests: tuple[Request, ...] = ()
    drafts_forced: bool = False


class Output(NamedTuple):
    """One token of one request, or its end.

    token_id: None for an end without a token. finish_reason: None until the request's last output.
    time: when the host knew the token, in seconds of `time.perf_counter`. logprob: None unless asked for.
    text: text that the token adds, if the engine looks for stop strings; else None.
    """

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    text: str | None = None
