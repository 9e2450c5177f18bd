"""The engine: requests come in at any time, tokens come out, one step after the other."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import integer, text
from common.events import Completion, FinishReason, Logprob, Params, TokenEvent, generate, params_per_prompt
from common.request import Request
from common.rules import check_prompt, finish_reason, output_limit
from common.sampling.params import SamplingParams
from common.text.stop_checker import StopChecker
from common.text.tokenizer import Tokenizer
from continuous.runner import Pending, Runner
from continuous.scheduler import Scheduler, Work

log = logging.getLogger(__name__)


class Output(NamedTuple):
    """One token of one request, or its end; the fields are those of `TokenEvent`."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None


@dataclass
class Stats:
    """What the engine has done. A step that computes more than a token for anybody is a prefill step."""

    steps: int = 0
    computed_tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    most_running: int = 0


class Engine:
    """Continuous batching around a scheduler and a runner.

    Args:
        scheduler: decides each step.
        runner: computes it.
        tokenizer: needed for stop strings only; the engine speaks token ids.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None = None) -> None:
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.config = runner.model.config
        self.max_len = scheduler.rows.max_len
        self.stats = Stats()
        self._ids = 0
        self._seeds = random.Random()
        self._outputs: list[Output] = []
        self._sinks: dict[Request, deque[Output]] = {}

    # Requests.

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise `UserError` for a request that can never be served."""
        self._checked(prompt, params)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        priority: int = 0,
        salt: str = "",
    ) -> list[Request]:
        """Put a request in line; it costs nothing until a step takes it up.

        Args:
            prompt: token ids.
            params: with `n > 1` the request becomes `n` requests.
            index: the caller's name for it, repeated in its events.
            priority: see `policies.priority`.
            salt: see `Request.salt`.

        Returns:
            The `n` requests.

        Raises:
            UserError: it can never be served.
        """
        priority, salt = integer("priority", priority), text("salt", salt)
        requests = self._checked(prompt, params)
        now = time.perf_counter()
        for sample, request in enumerate(requests):
            request.id, self._ids = self._ids, self._ids + 1
            request.index, request.sample, request.priority, request.salt = index, sample, priority, salt
            seed = params.seed_of(sample)
            request.seed = self._seeds.getrandbits(63) if seed is None else seed
            request.arrival = now
            if self.tokenizer is not None and params.stop:
                request.stop = StopChecker(self.tokenizer, params)
        if requests[0].limit == len(prompt):  # max_tokens is 0
            for request in requests:
                self._end(request, None, "length", now)
        else:
            self.scheduler.add(requests)
        return requests

    def _checked(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        known_text = self.tokenizer is not None
        check_prompt(prompt, self.config.vocab_size, self.max_len, params, has_tokenizer=known_text)
        limit = len(prompt) + output_limit(len(prompt), params, self.max_len)
        requests = [Request(0, list(prompt), len(prompt), limit, params) for _ in range(params.n)]
        self.scheduler.check(requests)
        return requests

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is; its tokens so far stay. Ended requests stay as they are.

        Of a request with `n > 1`, samples that still wait for this one to compute their prompt end with it.
        """
        if request.finish_reason is None:
            for member in [request, *request.siblings]:
                if member.finish_reason is None:
                    self._end(member, None, "abort", time.perf_counter())

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do and nothing to tell."""
        return self.scheduler.idle and not self._outputs

    # Steps.

    def step(self) -> list[Output]:
        """Run one step for everybody who can take part, and tell what came of it."""
        works = self.scheduler.schedule()
        if not works and not self.scheduler.idle:
            raise AssertionError("requests are left, but the scheduler finds nothing to do")
        pending = self.launch(works)
        if pending is not None:
            self.collect(pending)
        return self.drain()

    def launch(self, works: list[Work]) -> Pending | None:
        """Hand one step to the device. None if there is nothing to do or the step failed."""
        if not works:
            return None
        started = time.perf_counter()
        self._count(works)
        try:
            pending = self.runner.run(works)
        except Exception as error:
            self.fail(works, error)
            return None
        pending.started = started
        return pending

    def collect(self, pending: Pending) -> None:
        """Wait for a step and deal out its tokens; a step that failed ends its own requests and no others."""
        try:
            results = pending.get()
        except Exception as error:
            self.fail(pending.works, error)
            return
        now = time.perf_counter()
        self._clock(pending, now)
        result = iter(results)
        eos = self.config.eos_token_ids
        for work in pending.works:
            self.scheduler.land(work)
            for request in work.takers:
                token, logprob = next(result)
                if request.finish_reason is not None:
                    continue  # ended while this token was on its way
                request.tokens.append(token)
                if request.first_token is None:
                    request.first_token = now
                length = len(request.tokens) - request.prompt_len
                reason = finish_reason(token, length, request.params, eos, request.limit - request.prompt_len)
                if request.stop is not None and request.stop.push(token):
                    reason = "stop"
                if reason is None:
                    self._outputs.append(Output(request, token, None, now, logprob))
                else:
                    self._end(request, token, reason, now, logprob)

    def fail(self, works: Sequence[Work], error: Exception) -> None:
        """End the requests of a step that raised; what they hold is released and nothing is committed."""
        log.error("a step failed, and with it %d requests", len(works), exc_info=error)
        now = time.perf_counter()
        for work in works:
            self.scheduler.land(work, computed=False)
            for request in dict.fromkeys((work.request, *work.takers, *work.request.siblings)):
                if request.finish_reason is None:
                    request.error = error
                    self._end(request, None, "error", now)

    def drain(self) -> list[Output]:
        """What has come out since the last call, in order; streams get theirs as well."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            sink = self._sinks.get(output.request)
            if sink is not None:
                sink.append(output)
        return outputs

    def _end(
        self,
        request: Request,
        token: int | None,
        reason: FinishReason,
        now: float,
        logprob: Logprob | None = None,
    ) -> None:
        request.finish_reason, request.finished = reason, now
        self.scheduler.leave(request)
        self._outputs.append(Output(request, token, reason, now, logprob))

    # Front.

    def stream(self, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
        """Generate for all prompts at once; see `common.events.Streams`.

        A consumer that leaves early aborts what is left of its requests. Streams may be interleaved.

        Raises:
            UserError: a prompt or its parameters cannot be served; before anything is computed.
        """
        each = params_per_prompt(prompts, params)
        for prompt, settings in zip(prompts, each, strict=True):
            self.check(prompt, settings)
        return self._stream(prompts, each)

    def _stream(self, prompts: list[list[int]], each: list[SamplingParams]) -> Iterator[TokenEvent]:
        mine: deque[Output] = deque()
        requests: list[Request] = []
        try:
            for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
                requests += self.add(prompt, params, index=index)
            self._sinks.update((request, mine) for request in requests)
            left = len(requests)
            while left:
                if not mine:
                    outputs = self.step()
                    # What belongs to nobody's stream is for whoever calls `step` next.
                    self._outputs[:0] = [o for o in outputs if o.request not in self._sinks]
                while mine:
                    request, token, reason, now, logprob = mine.popleft()
                    left -= reason is not None
                    yield TokenEvent(request.index, token, reason, now, logprob, request.sample)
        finally:
            for request in requests:
                self._sinks.pop(request, None)
                self.abort(request)
            gone = set(requests)  # nobody is left to read their last events
            self._outputs = [output for output in self._outputs if output.request not in gone]

    def generate(self, prompts: Sequence[Sequence[int]], params: Params) -> list[Completion]:
        """Generate for all prompts and wait for the last; completions in (prompt, sample) order."""
        return generate(self, prompts, params)

    def _count(self, works: Sequence[Work]) -> None:
        stats = self.stats
        stats.steps += 1
        stats.computed_tokens += sum(work.count for work in works)
        stats.most_running = max(stats.most_running, len(self.scheduler.running))

    def _clock(self, pending: Pending, now: float) -> None:
        tokens = sum(work.count for work in pending.works)
        if tokens > len(pending.works):
            self.stats.prefill_tokens += tokens
            self.stats.prefill_seconds += now - pending.started
        else:
            self.stats.decode_tokens += tokens
            self.stats.decode_seconds += now - pending.started
