"""The engine as the API process sees it: completions go in, their tokens come back, and it may die.

Everything here runs in one thread, the event loop's. A completion is a number; its submitter gives a
`Sink` that is called with its tokens, in order, and once with its end, whatever happens to the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from common.sampling.params import SamplingParams
from serving.messages import (
    AbortRequests,
    AddRequest,
    Command,
    Ready,
    StepReport,
    StepStats,
    encode,
)
from serving.seams import Sink

State = Literal["starting", "ready", "restarting", "stopped"]
DIED = "the engine has ended and is being restarted; try again"


class EngineClient:
    """Sends requests to an engine and gives the tokens to their sinks. A subclass runs the engine.

    state: of the engine; only at "ready" it takes completions.
    ready, stats: the engine's sizes, and its statistics after the last step.
    now: `time.perf_counter()` when the step arrived whose tokens are being given to sinks.
    on_step: hooks that are called with each step's report once its tokens have been given to sinks.
    on_ready: hooks that are called once, when the first engine takes requests.
    """

    def __init__(self) -> None:
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.stats = StepStats()
        self.now = 0.0
        self.restarts = 0
        self.on_step = list[Callable[[StepReport], None]]()
        self.on_ready = list[Callable[[], None]]()
        self._sinks = dict[int, Sink]()
        self._next = 0
        self._outbox = list[Command]()

    def transmit(self, data: bytes) -> None:
        """Send an encoded message to the engine; if the engine has ended, the message is dropped."""
        raise NotImplementedError

    async def run(self) -> None:
        """Start the engine, and start it again whenever it ends, until `stop`."""

    async def stop(self) -> None:
        """End the engine for good; the sinks of completions that have not ended get an error."""

    @property
    def in_flight(self) -> int:
        """Return the number of submitted completions that have not ended."""
        return len(self._sinks)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        sinks: Sequence[Sink],
        **options: Any,
    ) -> range:
        """Send a prompt of `params.n` completions to the engine; return their numbers.

        sinks: one for each; if the engine has ended, they get an error. options: more of `AddRequest`.
        """
        numbers = range(self._next, self._next + params.n)
        self._next += params.n
        self._sinks.update(zip(numbers, sinks, strict=True))
        self.tell(AddRequest(numbers.start, prompt, params, **options))
        return numbers

    def abort(self, numbers: Iterable[int]) -> None:
        """Abort the completions with these numbers: their sinks are not called again."""
        mine = [number for number in numbers if self._sinks.pop(number, None) is not None]
        if mine:
            self.tell(AbortRequests(mine))

    def tell(self, command: Command) -> None:
        """Send a command to the engine; commands of one turn of the event loop are sent in one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self.state in ("ready", "stopped"):
            self.transmit(encode(outbox))
        elif self._sinks:  # the engine has gone since they were admitted
            self._lose()

    def _route_tokens(self, step: StepReport) -> None:
        """Give each completion's sink the notes, then the tokens, then the end that a step's report has.

        An end with a token arrives with the token, another afterwards. A sink that ends or leaves is called
        no more, and is not in flight when it gets its end. Hooks come last. Sinks may abort any completions.
        """
        self.stats, sinks = step.stats, self._sinks
        for number, kind, values in step.notes:
            if number in sinks:
                sinks[number].note(kind, values)
        logprobs, last = dict(step.logprobs), {end.place: end.reason for end in step.ends}
        for place, (number, token) in enumerate(zip(step.numbers, step.tokens, strict=True)):
            sink, reason = sinks.get(number), last.get(place)
            if sink is None:  # it has left
                continue
            if reason is not None:
                del sinks[number]
            sink.token(token, reason, logprobs.get(place))
        for end in step.ends:
            sink = sinks.pop(end.number, None)
            if sink is not None:
                sink.end(end.reason, end.message)
        for hook in self.on_step:
            hook(step)

    def _lose(self) -> None:
        """End every completion in flight, at its sink, with the error "died", since the engine has ended."""
        if self.state != "stopped":
            self.state = "restarting"
        lost = list(self._sinks.values())
        self._sinks, self._outbox = {}, []
        for sink in lost:
            sink.end("died", DIED)
