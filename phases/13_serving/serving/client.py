"""The engine as the API process sees it: completions go in, their tokens come back, and it may die.

Everything here runs in one thread, the event loop's. A completion is a number; whoever submits one gives a
`Sink` that is called with its tokens, in order, and once with its end, whatever happens to the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from common.sampling.params import SamplingParams
from serving.messages import (
    AbortCompletions,
    AddPrompt,
    Command,
    Ready,
    StepReport,
    StepStats,
    WatchEngine,
    encode,
)
from serving.seams import Sink

State = Literal["starting", "ready", "restarting", "stopped"]
DIED = "the engine has ended and is being restarted; try again"


class EngineClient:
    """Talks to an engine; where that is, and that it lives, is a subclass's business.

    state: only "ready" takes completions.
    ready, stats: what the engine has said about itself, and after its last step.
    now: `time.perf_counter()` when the step that is being dealt out has come.
    """

    def __init__(self) -> None:
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.stats, self.now, self.restarts = StepStats(), 0.0, 0
        self.on_step: Callable[[StepReport], None] = lambda step: None
        self._sinks: dict[int, Sink] = {}
        self._next = 0
        self._outbox: list[Command] = []
        self._heard = 0.0
        self._watch = 0.0

    def transmit(self, data: bytes) -> None:
        """Send a message to the engine; what cannot be sent is lost with the engine."""
        raise NotImplementedError

    async def run(self) -> None:
        """Start the engine, and start it again whenever it ends, until `stop`."""

    async def stop(self) -> None:
        """End the engine for good; whoever still waits is told an error."""

    @property
    def in_flight(self) -> int:
        """Completions that have not ended."""
        return len(self._sinks)

    # What callers do.

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        sinks: Sequence[Sink],
        *,
        priority: int = 0,
        salt: str = "",
        traced: bool = False,
        marks: bool = False,
    ) -> range:
        """Send a prompt of `params.n` completions, one sink each; returns their numbers.

        An engine that has gone meanwhile ends them with an error, as any others.
        """
        numbers = range(self._next, self._next + params.n)
        self._next += params.n
        self._sinks.update(zip(numbers, sinks, strict=True))
        if not self._sinks.keys() - numbers:
            self._heard = time.monotonic()  # it had no reason to speak before
        self._send(AddPrompt(numbers.start, prompt, params, priority, salt, traced, marks))
        return numbers

    def abort(self, numbers: Iterable[int]) -> None:
        """End these completions: their sinks are not called again."""
        mine = [number for number in numbers if self._sinks.pop(number, None) is not None]
        if mine:
            self._send(AbortCompletions(mine))

    def watch(self, seconds: float) -> None:
        """Ask for a picture of the engine every so many seconds; 0: no more."""
        self._watch = seconds
        self._send(WatchEngine(seconds))

    def _send(self, command: Command) -> None:
        """All that is said in one turn of the event loop travels in one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self.state in ("ready", "stopped"):
            self.transmit(encode(outbox))

    # What the engine says.

    def _deal(self, step: StepReport) -> None:
        """Give the sinks what a step has for them. They may abort while this runs, themselves and others.

        A sink hears first what was found, that it has entered, and what was read of its prompt; then its
        tokens in their order, each behind its mark; an end with a token is told with the token, another
        afterwards. A sink that ends or leaves is called no more, and is not in flight when it is told its
        end. `on_step` comes last.
        """
        self.stats, sinks = step.stats, self._sinks
        for number, tokens in step.cached:
            if number in sinks:
                sinks[number].found(tokens)
        for number in step.entered:
            if number in sinks:
                sinks[number].entered()
        for number, prompt in step.prompts:
            if number in sinks:
                sinks[number].read(prompt)
        logprobs = {token.place: token for token in step.logprobs}
        last = {end.place: end for end in step.ends}
        marks = dict(step.marks)
        for place, (number, token) in enumerate(zip(step.numbers, step.tokens, strict=True)):
            sink = sinks.get(number)
            if sink is None:  # it has left
                continue
            if place in marks:
                sink.marked(marks[place])
            end = last.get(place)
            if end is None:
                sink.token(token, None, logprobs.get(place))
            else:
                del sinks[number]
                sink.token(token, end.reason, logprobs.get(place))
        for end in step.ends:
            sink = sinks.pop(end.number, None)
            if sink is not None:
                sink.end(end.reason, end.message)
        self.on_step(step)

    def _lose(self) -> None:
        """End all sinks that wait for an engine that is no more."""
        if self.state != "stopped":
            self.state = "restarting"
        lost, self._sinks, self._outbox = list(self._sinks.values()), {}, []
        for sink in lost:
            sink.end("died", DIED)
