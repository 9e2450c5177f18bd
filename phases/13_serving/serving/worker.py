"""The engine process: it takes in what was sent, runs a step, and sends back what came of it.

The loop never waits while there is something to compute, and no client can stop it.
"""

from __future__ import annotations

import logging
import time

from common.errors import UserError
from common.request import Request
from continuous.engine import Engine
from continuous.messages import Output
from paged_cache import PagedCache
from prefix_cache.cache import PrefixCache, PrefixStats
from serving.messages import (
    FAILED,
    NO_TOKEN,
    AbortCompletions,
    AddPrompt,
    Command,
    End,
    StepReport,
    StepStats,
    Stop,
    Token,
    WatchEngine,
    ending,
    read,
)
from serving.seams import Channel, Observer, ServedEngine

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long an idle engine sleeps at most before it looks around."""


class Worker:
    """One engine and the loop around it.

    live: completions that have not ended, by their numbers.
    observer: reads along, if anything does.
    """

    def __init__(self, engine: ServedEngine, channel: Channel, observer: Observer | None = None) -> None:
        self.engine, self.channel, self.observer = engine, channel, observer or Observer(engine)
        self.live: dict[int, Request] = {}
        self._fresh: set[int] = set()
        self._ends: list[End] = []
        self._steps = self._computed = 0
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
        if busy or self._ends or self.observer.due(started):
            self.channel.send(self._report(outputs, time.perf_counter() - started, started))

    def obey(self, command: Command) -> None:
        """Carry out one command. What is wrong with a request is told to its sender and harms nobody else."""
        match command:
            case AddPrompt():
                self._add(command)
            case AbortCompletions():
                for number in command.numbers:
                    request = self.live.get(number)
                    if request is not None:
                        self.engine.abort(request)
            case WatchEngine():
                self.observer.hear(command, [])
            case Stop():
                self._stopped = True

    def _add(self, command: AddPrompt) -> None:
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
            self.observer.hear(command, requests)

    def _report(self, outputs: list[Output], seconds: float, now: float) -> StepReport:
        step = StepReport([], [], self._ends, self._stats(seconds))
        self._ends = []
        for request, token, reason, _, logprob, _ in outputs:
            number, place = request.index + request.sample, NO_TOKEN
            if number in self._fresh:
                self._fresh.discard(number)
                if request.cached_tokens:
                    step.cached.append((number, request.cached_tokens))
                found = request.prompt_logprobs
                if found is not None and (len(found) == 1 or found[-1] is not None):
                    step.prompts.append((number, read(found)))
            if token is not None:
                place = len(step.tokens)
                if logprob is not None:
                    step.logprobs.append(Token(place, logprob.chosen, list(logprob.top)))
                step.numbers.append(number)
                step.tokens.append(token)
            if reason is not None:
                step.ends.append(ending(number, reason, request.error, place))
                self.live.pop(number, None)
        self.observer.write(step, now)
        return step

    def _stats(self, seconds: float) -> StepStats:
        engine = self.engine
        if not isinstance(engine, Engine) or not isinstance(engine.cache, PagedCache):
            return StepStats(self._steps, len(self.live), step_seconds=seconds)
        found = engine.cache.stats if isinstance(engine.cache, PrefixCache) else PrefixStats()
        computed = engine.stats.computed_tokens
        step_tokens, self._computed = computed - self._computed, computed
        return StepStats(
            self._steps,
            len(engine.scheduler.running),
            engine.cache.free,
            engine.scheduler.preemptions,
            computed,
            found.lookup_tokens,
            found.hit_tokens,
            step_tokens,
            seconds,
        )
