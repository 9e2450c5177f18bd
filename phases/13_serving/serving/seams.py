"""Seams of the loop around an engine: the engine, the other process, an observer, and sinks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.messages import Output
from serving.messages import Command, PromptToken, Report, StepReport, Token


class ServedEngine(Protocol):
    """An engine as the loop around it needs it: `continuous.Engine` is one."""

    max_len: int

    @property
    def idle(self) -> bool:
        """True where a step would have nothing to do."""
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
        """Return all commands that have come; wait for the first at most so long."""
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
    """A taker of the tokens of one completion."""

    def token(self, token: int, reason: str | None, logprob: Token | None) -> None:
        """Take the next token. reason: why it is the last one, if it is."""
        ...

    def end(self, reason: str, message: str) -> None:
        """Take the end that has no further token."""
        ...

    def found(self, tokens: int) -> None:
        """Take note of how many tokens of its prompt the prefix cache had, before its first token."""
        ...

    def entered(self) -> None:
        """Take note that it has a row, where it is traced."""
        ...

    def read(self, prompt: list[PromptToken | None]) -> None:
        """Take the log-probabilities of its prompt, where that was asked, before its first token."""
        ...

    def marked(self, mark: str) -> None:
        """Take note of how the next token came about, where that was asked."""
        ...
