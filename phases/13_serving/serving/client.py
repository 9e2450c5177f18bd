"""The engine as the API process sees it: completions go in, their tokens come back, and it may die.

Everything here runs in one thread, the event loop's. A completion is a number; whoever submits one gives a
`Sink` that is called with its tokens, in order, and once with its end, whatever happens to the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

import zmq
import zmq.asyncio

from common.sampling.params import SamplingParams
from serving import worker
from serving.messages import (
    Abort,
    Add,
    Command,
    Failed,
    Ready,
    Stats,
    Step,
    Stop,
    Token,
    Watch,
    encode,
    report,
)

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "stopped"]
DIED = "the engine has ended and is being restarted; try again"
LONGEST_PAUSE = 30.0
"""Seconds between two tries to start an engine that ends at once."""
QUICK = 60.0
"""An engine that lived shorter than this did not recover: the pause before the next one doubles."""


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


class CannotStart(Exception):
    """The first engine could not be made. wrong_input: somebody can correct it, and the message says how."""

    def __init__(self, reason: str, wrong_input: bool) -> None:
        super().__init__(reason)
        self.wrong_input = wrong_input


class EngineClient:
    """Keeps an engine process alive and talks to it.

    Args:
        make: makes the engine, there; any callable that can be pickled.
        silence: seconds without a word, while somebody waits for tokens, after which it counts as hanging.

    state: only "ready" takes completions.
    ready, stats: what the engine has said about itself, and after its last step.
    now: `time.perf_counter()` when the step that is being dealt out has come.
    """

    def __init__(self, make: Callable[[], Any], *, silence: float = 300.0) -> None:
        self.make, self.silence = make, silence
        self.state: State = "starting"
        self.ready: Ready | None = None
        self.stats, self.now, self.restarts = Stats(), 0.0, 0
        self.on_step: Callable[[Step], None] = lambda step: None
        self.process: Any = None
        self._sinks: dict[int, Sink] = {}
        self._next = 0
        self._outbox: list[Command] = []
        self._socket: zmq.asyncio.Socket | None = None
        self._heard = 0.0
        self._watch = 0.0
        self._stopping = False
        atexit.register(self._kill)  # it ignores SIGTERM, and Python would wait for it for ever

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
    ) -> range:
        """Send a prompt of `params.n` completions, one sink each; returns their numbers.

        An engine that has gone meanwhile ends them with an error, as any others.
        """
        numbers = range(self._next, self._next + params.n)
        self._next += params.n
        self._sinks.update(zip(numbers, sinks, strict=True))
        if not self._sinks.keys() - numbers:
            self._heard = time.monotonic()  # it had no reason to speak before
        self._send(Add(numbers.start, prompt, params, priority, salt))
        return numbers

    def abort(self, numbers: Iterable[int]) -> None:
        """Nobody wants these any more: their sinks are not called again."""
        mine = [number for number in numbers if self._sinks.pop(number, None) is not None]
        if mine:
            self._send(Abort(mine))

    def watch(self, seconds: float) -> None:
        """Ask for a picture of the engine every so many seconds; 0: no more."""
        self._watch = seconds
        self._send(Watch(seconds))

    def _send(self, command: Command) -> None:
        """All that is said in one turn of the event loop travels in one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._socket is not None and self.state in ("ready", "stopped"):
            with suppress(zmq.ZMQError):  # the engine has gone; its end is told in `_live`
                self._socket.send(encode(outbox), zmq.NOBLOCK)

    # The engine's lives.

    async def run(self) -> None:
        """Start the engine, and start it again whenever it ends, until `stop`.

        Raises:
            CannotStart: the first engine could not be made.
        """
        pause = 0.0
        while not self._stopping:
            started = time.monotonic()
            try:
                failure = await self._live()
            finally:
                self._lose()
            if self._stopping:
                return
            if self.ready is None:
                raise failure or CannotStart("the engine process ended while it started", wrong_input=False)
            self.state, self.restarts = "restarting", self.restarts + 1
            pause = min(2 * pause or 0.5, LONGEST_PAUSE) if time.monotonic() - started < QUICK else 0.0
            log.error("the engine has ended; the next one starts in %.1f s", pause)
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """End the engine for good; whoever still waits is told an error."""
        self._stopping, self.state = True, "stopped"
        self._send(Stop())
        for _ in range(50):
            if self.process is None or not self.process.is_alive():
                break
            await asyncio.sleep(0.1)
        self._kill()

    async def _live(self) -> CannotStart | None:
        """One life of an engine process, from its start to its end, by itself or by our hand."""
        loop = asyncio.get_running_loop()
        folder = tempfile.mkdtemp(prefix="ladder-")
        socket = self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)  # what may be in flight has limits of its own
        socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        context = multiprocessing.get_context("spawn")
        process = self.process = context.Process(target=worker.main, args=(self.make, address), name="engine")
        process.start()
        ended = loop.create_future()

        def gone() -> None:
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(process.sentinel, gone)
        reading = asyncio.ensure_future(self._read(socket))
        self._heard = time.monotonic()
        try:
            while True:
                await asyncio.wait({reading, ended}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    return reading.result()
                if ended.done():
                    return None
                if self.state == "ready" and self._sinks and time.monotonic() - self._heard > self.silence:
                    log.error("the engine has said nothing for %.0f s, so it is ended", self.silence)
                    return None
        finally:
            reading.cancel()
            loop.remove_reader(process.sentinel)
            self._socket = None
            self._kill()
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def _read(self, socket: zmq.asyncio.Socket) -> CannotStart | None:
        """Deal out what the engine says."""
        while True:
            message = report(await socket.recv())
            self._heard, self.now = time.monotonic(), time.perf_counter()
            match message:
                case Step():
                    self._deal(message)
                case Ready():
                    self.ready, self.stats = message, Stats(free_blocks=message.blocks)
                    self.state = "stopped" if self._stopping else "ready"
                    if self._watch:
                        self.watch(self._watch)
                case Failed():
                    log.error("the engine cannot be made: %s", message.reason)
                    return CannotStart(message.reason, message.wrong_input)

    def _deal(self, step: Step) -> None:
        """Give everybody their tokens. Sinks may abort while this runs, themselves and others."""
        self.stats, sinks = step.stats, self._sinks
        for number, tokens in step.cached:
            if number in sinks:
                sinks[number].found(tokens)
        logprobs = {token.place: token for token in step.logprobs}
        last = {end.place: end for end in step.ends}
        for place, (number, token) in enumerate(zip(step.numbers, step.tokens, strict=True)):
            sink = sinks.get(number)
            if sink is None:  # it has left
                continue
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
        """Whoever waits for an engine that is no more is told so."""
        self.state = "stopped" if self._stopping else "restarting"
        lost, self._sinks, self._outbox = list(self._sinks.values()), {}, []
        for sink in lost:
            sink.end("died", DIED)

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.join()
            process.close()
