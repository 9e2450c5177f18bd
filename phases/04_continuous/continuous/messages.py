"""The commands that go into an engine and the outputs that come out, between two steps."""

from __future__ import annotations

from typing import NamedTuple

from common.events import FinishReason, Logprob
from common.request import Request


class Output(NamedTuple):
    """One token of one request, or its end; the fields are those of `TokenEvent`."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    text: str | None = None


class Add(NamedTuple):
    """A command: put the samples of one prompt in line."""

    requests: list[Request]


class Abort(NamedTuple):
    """A command: end a request."""

    request: Request
