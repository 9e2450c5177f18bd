"""The engine process: it takes in what was sent, runs a step, and sends back what came of it.

The loop is the whole process. It never waits while there is something to compute, and it waits for nothing
else when there is not. The API process may be busy, slow or gone; no request of one client can stop it.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol

import zmq

from common.errors import UserError
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.engine import Output
from paged_cache import PagedEngine
from serving.messages import (
    NO_TOKEN,
    Abort,
    Add,
    Command,
    End,
    Failed,
    Ready,
    Report,
    Stats,
    Step,
    Stop,
    Token,
    Watch,
    commands,
    encode,
)
from serving.watching.picture import picture

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long an idle engine sleeps at most before it looks around."""
FAILED = "the step that computed this request failed; the server's log says why"


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


class Worker:
    """One engine and the loop around it.

    live: completions that have not ended, by their numbers.
    """

    def __init__(self, engine: Served, channel: Channel) -> None:
        self.engine, self.channel = engine, channel
        self.live: dict[int, Request] = {}
        self._fresh: set[int] = set()
        self._ends: list[End] = []
        self._steps = 0
        self._watch, self._drawn = 0.0, 0.0
        self._stopped = False

    def run(self) -> None:
        """Until `Stop`."""
        while not self._stopped:
            self.turn()

    def turn(self) -> None:
        """Take in all commands there are, and run a step if there is anything to do."""
        for command in self.channel.receive(IDLE_SECONDS if self.engine.idle else 0.0):
            self.obey(command)
        if self._stopped:
            return
        started = time.perf_counter()
        busy = not self.engine.idle
        outputs = self.engine.step() if busy else []
        self._steps += busy
        if busy or self._ends or self._due(started):
            self.channel.send(self._report(outputs, time.perf_counter() - started, started))

    def obey(self, command: Command) -> None:
        """Carry out one command. What is wrong with a request is told to its sender and harms nobody else."""
        match command:
            case Add():
                self._add(command)
            case Abort():
                for number in command.numbers:
                    request = self.live.get(number)
                    if request is not None:
                        self.engine.abort(request)
            case Watch():
                self._watch, self._drawn = command.seconds, 0.0
            case Stop():
                self._stopped = True

    def _add(self, command: Add) -> None:
        numbers = range(command.first, command.first + command.params.n)
        try:
            requests = self.engine.add(
                command.prompt,
                command.params,
                index=command.first,
                priority=command.priority,
                salt=command.salt,
            )
        except UserError as error:
            self._ends += [End(number, "refused", str(error)) for number in numbers]
        except Exception as error:
            log.error("request %d cannot be added", command.first, exc_info=error)
            self._ends += [End(number, "error", FAILED) for number in numbers]
        else:
            self.live.update(zip(numbers, requests, strict=True))
            self._fresh.update(numbers)

    def _report(self, outputs: list[Output], seconds: float, now: float) -> Step:
        step = Step([], [], self._ends, self._stats(seconds))
        self._ends = []
        for request, token, reason, _, logprob, _ in outputs:
            number, place = request.index + request.sample, NO_TOKEN
            if token is not None:
                place = len(step.tokens)
                if logprob is not None:
                    step.logprobs.append(Token(place, logprob.chosen, list(logprob.top)))
                step.numbers.append(number)
                step.tokens.append(token)
                if number in self._fresh:
                    self._fresh.discard(number)
                    if request.cached_tokens:
                        step.cached.append((number, request.cached_tokens))
            if reason is not None:
                step.ends.append(End(number, reason, FAILED if reason == "error" else "", place))
                self.live.pop(number, None)
                self._fresh.discard(number)
        if self._due(now):
            self._drawn = now
            step.picture = picture(self.engine)
        return step

    def _due(self, now: float) -> bool:
        """Whether somebody watches who has not got a picture for long enough."""
        return self._watch > 0.0 and now - self._drawn >= self._watch

    def _stats(self, seconds: float) -> Stats:
        engine = self.engine
        if not isinstance(engine, PagedEngine):
            return Stats(self._steps, len(self.live), step_seconds=seconds)
        computed, found = engine.stats.computed_tokens, getattr(engine.cache, "stats", None)
        step_tokens, self._computed = computed - self._computed, computed
        return Stats(
            self._steps,
            len(engine.scheduler.running),
            engine.cache.free,
            engine.scheduler.preemptions,
            computed,
            found.lookup_tokens if found else 0,
            found.hit_tokens if found else 0,
            step_tokens,
            seconds,
        )

    _computed = 0


def ready(engine: Served, vocab_size: int, seconds: float) -> Ready:
    """What the API process learns about an engine."""
    if not isinstance(engine, PagedEngine):
        return Ready(engine.max_len, vocab_size, 1, 0, 0, "fcfs", "", seconds)
    policy = getattr(engine.scheduler.policy, "__name__", "")
    cache = engine.cache
    return Ready(
        engine.max_len,
        vocab_size,
        engine.scheduler.rows.count,
        cache.allocator.count,
        cache.block_size,
        policy,
        str(engine.ledger),
        seconds,
    )


# The process.


class Pipe:
    """A `Channel` over ZeroMQ."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(address)

    def receive(self, seconds: float) -> list[Command]:
        """See `Channel`."""
        found: list[Command] = []
        if seconds and not self._socket.poll(int(seconds * 1e3)):
            return found
        while True:
            try:
                found += commands(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found

    def send(self, report: Report) -> None:
        """See `Channel`."""
        self._socket.send(encode(report))


def main(make: Callable[[], Any], address: str) -> None:
    """The whole life of the engine process.

    Args:
        make: makes the engine; any callable that can be pickled.
        address: where the API process listens.
    """
    # Signals of the terminal or of systemd go to the whole group: the API process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe = Pipe(address)
    started = time.perf_counter()
    try:
        engine = make()
    except UserError as error:
        pipe.send(Failed(str(error), wrong_input=True))
        return
    except BaseException as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", wrong_input=False))
        raise
    gc.collect()
    gc.freeze()  # the model and its modules are here to stay: no collection looks at them again
    pipe.send(ready(engine, engine.config.vocab_size, time.perf_counter() - started))
    try:
        Worker(engine, pipe).run()
    finally:
        sys.stderr.flush()


def _die_with_parent() -> None:
    """An engine whose API process was killed has nobody to talk to."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
