"""The commands that go into an engine and the outputs that come out, between two steps."""

from __future__ import annotations

from typing import NamedTuple

from common.events import FinishReason, Logprob
from common.request import Request


class Output(NamedTuple):
    """One token of one request, or its end; `common.events.TokenEvent` describes the fields."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    text: str | None = None


class Add(NamedTuple):
    """A command: give the samples of one prompt to the scheduler."""

    requests: list[Request]


class Abort(NamedTuple):
    """A command: end a request."""

    request: Request
