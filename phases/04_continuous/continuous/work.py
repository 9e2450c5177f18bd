"""A request's part of one step, and the outputs of an engine between two."""

from __future__ import annotations

from typing import NamedTuple

from common.events import FinishReason, Logprob
from common.request import Request


class Work(NamedTuple):
    """The tokens that one step computes for one request. It does not change, whatever happens to the request.

    start, count: which tokens to compute, `start .. start + count - 1`, in row `row`.
    drafts: guessed tokens among them, at the end; only a work with one sampled request has any.
    sampled_requests: requests that get a token sampled from the last one's logits: none in the middle of a
        prompt, then the request itself, and after a shared prompt its siblings too.
    drafts_forced: True if the drafts are certain to be accepted, so that a next step may follow them.
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
    time: in seconds, when the host knew the token. logprob: None unless asked for.
    text: text that the token adds, if the engine looks for stop strings; else None.
    """

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    text: str | None = None
