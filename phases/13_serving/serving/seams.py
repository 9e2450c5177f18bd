"""What the loop around an engine needs, the engine and somebody to talk to, and who wants its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.messages import Output
from serving.messages import Command, Read, Report, Token


class Served(Protocol):
    """What the loop needs of an engine: `continuous.Engine` is one."""

    max_len: int

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        ...

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, index: int, priority: int, salt: str
    ) -> list[Request]:
        """See `Engine.add`."""
        ...

    def abort(self, request: Request) -> None:
        """See `Engine.abort`."""
        ...

    def step(self) -> list[Output]:
        """See `Engine.step`."""
        ...


class Channel(Protocol):
    """The other process, as the loop sees it."""

    def receive(self, seconds: float) -> list[Command]:
        """All commands that have come; waits for the first at most so long."""
        ...

    def send(self, report: Report) -> None:
        """Hand over a report."""
        ...


class Sink(Protocol):
    """Who wants the tokens of one completion."""

    def token(self, token: int, reason: str | None, logprob: Token | None) -> None:
        """The next token. reason: why it is the last one, if it is."""
        ...

    def end(self, reason: str, message: str) -> None:
        """The completion has ended without a further token."""
        ...

    def found(self, tokens: int) -> None:
        """So many tokens of its prompt were in the prefix cache; told before its first token."""
        ...

    def entered(self) -> None:
        """It has got a row; told to who asked to trace it."""
        ...

    def read(self, prompt: list[Read | None]) -> None:
        """How likely the tokens of its prompt were, where that was asked; told before its first token."""
        ...

    def marked(self, mark: str) -> None:
        """How the next token came about; told just before it, to those who asked."""
        ...
