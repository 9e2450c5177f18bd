"""The outputs of an engine between two steps."""

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
