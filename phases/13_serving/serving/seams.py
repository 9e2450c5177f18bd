"""Seams of the loop around an engine: the engine, the other process, an observer, and sinks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.messages import Output
from serving.messages import Command, PromptToken, Report, StepReport, Token


class ServedEngine(Protocol):
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


class Observer:
    """Reads along in the engine's process; this one does nothing, and the appendix has one that draws."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Note a command, and the requests that it has added."""

    def due(self, now: float) -> bool:
        """Tell if there is something to report though no step was run."""
        return False

    def write(self, step: StepReport, now: float) -> None:
        """Add to the report of a step."""


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

    def read(self, prompt: list[PromptToken | None]) -> None:
        """How likely the tokens of its prompt were, where that was asked; told before its first token."""
        ...

    def marked(self, mark: str) -> None:
        """How the next token came about; told just before it, to those who asked."""
        ...
