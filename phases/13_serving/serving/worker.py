"""The engine process: it takes in commands, runs a step, and sends its tokens back to the API process.

The loop never waits while there is something to compute, and no client's request can end it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from common.errors import NotANumber, UserError
from common.request import Request
from continuous.engine import Engine
from continuous.work import Output
from paged_cache import PagedCache
from prefix_cache.cache import PrefixCache
from serving.messages import (
    CACHED,
    NO_TOKEN,
    AbortRequests,
    AddRequest,
    Command,
    DrawEngine,
    End,
    StepReport,
    StepStats,
    Stop,
)
from serving.seams import NullObserver, Observer

if TYPE_CHECKING:
    from serving.liveness import Pipe

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long an idle engine sleeps at most before it looks around."""
FAILED = "the step that computed this request failed; the server's log says why"


def ending(
    number: int, reason: str, error: BaseException | None, place: int = NO_TOKEN
) -> End:
    """Return the report of a completion's end. A fault of the request itself is explained to its sender.

    reason: "stop", "length", "abort", or "error" with the exception `error`. The rest as in `End`.
    """
    message = FAILED if reason == "error" else ""
    if isinstance(error, UserError | NotANumber):
        reason, message = "refused" if isinstance(error, UserError) else "nan", str(error)
    return End(number, reason, message, place)


class Worker:
    """The loop of the engine process: takes commands, runs steps, and reports them.

    channel: the connection to the API process. observer: watches the engine's steps; None: no observer.
    live: the engine's requests for completions that have not ended, by the completions' numbers.
    """

    def __init__(
        self, engine: Engine, channel: Pipe, observer: Observer | None = None
    ) -> None:
        self.engine = engine
        self.channel = channel
        self.observer = observer or NullObserver()
        self.live = dict[int, Request]()
        self._ends = list[End]()
        self._steps = self._computed = 0
        self._stopped = False

    def run(self) -> None:
        """Take commands and run steps until the command `Stop` comes."""
        while not self._stopped:
            self.turn()

    def turn(self) -> None:
        """Carry out all commands that have come, run a step if there are requests, and report its tokens."""
        for command in self.channel.receive(IDLE_SECONDS if self.engine.idle else 0.0):
            self.obey(command)
        if self._stopped:
            return
        started = time.perf_counter()
        busy = not self.engine.idle
        outputs = self.engine.step() if busy else []
        self._steps += busy
        if busy or self._ends or self.observer.due:
            self.channel.send(self._report(outputs, started))

    def obey(self, command: Command) -> None:
        """Carry out one command. An error in a request is reported to its sender and harms no other."""
        match command:
            case AddRequest():
                self._add(command)
            case AbortRequests():
                for number in command.numbers:
                    if number in self.live:
                        self.engine.abort(self.live[number])
            case DrawEngine():
                self.observer.hear(command, [])
            case Stop():
                self._stopped = True

    def _add(self, command: AddRequest) -> None:
        first, params = command.first, command.params
        numbers = range(first, first + params.n)
        try:
            requests = self.engine.add(
                command.prompt,
                params,
                index=first,
                priority=command.priority,
                salt=command.salt,
            )
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("request %d cannot be added", first)
            self._ends += [ending(number, "error", error) for number in numbers]
        else:
            self.live.update(zip(numbers, requests, strict=True))
            if command.wanted:
                self.observer.hear(command, requests)

    def _report(self, outputs: list[Output], started: float) -> StepReport:
        step = StepReport([], [], self._ends, self._stats(time.perf_counter() - started))
        self._ends = []
        for request, token, reason, at, logprob, _ in outputs:
            number, place = request.index + request.sample, NO_TOKEN
            if request.cached_tokens and not request.sample and at == request.first_token:
                step.notes.append((number, CACHED, [request.cached_tokens]))
            if token is not None:
                place = len(step.tokens)
                if logprob is not None:
                    step.logprobs.append((place, logprob))
                step.numbers.append(number)
                step.tokens.append(token)
            if reason is not None:
                step.ends.append(ending(number, reason, request.error, place))
                self.live.pop(number, None)
        if self.observer.due:
            self.observer.write(step)
        return step

    def _stats(self, seconds: float) -> StepStats:
        engine = self.engine
        stats = StepStats(self._steps, len(self.live), step_seconds=seconds)
        if isinstance(engine.cache, PagedCache):
            stats.running = len(engine.scheduler.running)
            stats.preemptions = engine.scheduler.preemptions
            stats.free_blocks = engine.cache.free
            stats.computed_tokens = engine.stats.computed_tokens
            stats.step_tokens = stats.computed_tokens - self._computed
            self._computed = stats.computed_tokens
            if isinstance(engine.cache, PrefixCache):
                found = engine.cache.stats
                stats.lookup_tokens, stats.hit_tokens = found.lookup_tokens, found.hit_tokens
        return stats
