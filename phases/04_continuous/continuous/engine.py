"""The engine: requests come in at any time, tokens come out, one step after the other."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, final

from common import events
from common.errors import NotANumber, UserError, integer, text
from common.events import FinishReason
from common.interrupts import uninterrupted
from common.request import Request
from common.rules import check_prompt, finish_reason
from common.sampling.ops import NAN_TOKEN
from common.sampling.params import SamplingParams
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from continuous import streams
from continuous.runner import Forwarded, Pending, Results, Runner, Token
from continuous.scheduler import Scheduler
from continuous.seams import NO_GRAMMAR_MANAGER, SEQUENTIAL_LOOP, GrammarManager, Loop
from continuous.stats import Stats, marked
from continuous.work import Output, Work

log = logging.getLogger(__name__)

WAIT = 0.005
"""Seconds that a step sleeps if all requests wait for their grammars."""
MOST_LOOKS = 64
"""Most waiting requests whose grammars are checked in a step; if there are more, they take turns."""


@final
class Engine:
    """Continuous batching: a scheduler that chooses each step's tokens, and a runner that computes them.

    Requests are added and aborted through an inbox, which a step empties before it does anything else. So
    any thread may call `add` and `abort`, and between two steps nothing changes.

    Args:
        scheduler: decides which tokens of which requests each step computes.
        runner: computes the steps: runs the model and samples.
        tokenizer: needed for stop strings only; the engine takes and returns token ids.
        grammar_manager: masks the tokens that may be sampled; by default, none is masked.
        loop: decides when steps are launched and collected; by default, one after the other.
        on_step_failed: called with the error of a step that failed, after its requests have ended.
        memory_plan: how the memory is divided between weights and cache; None in this phase.

    The attribute `cache` is the scheduler's `CacheManager`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        *,
        grammar_manager: GrammarManager = NO_GRAMMAR_MANAGER,
        loop: Loop = SEQUENTIAL_LOOP,
        on_step_failed: Callable[[BaseException], None] = lambda error: None,
        memory_plan: Any = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.grammar_manager = grammar_manager
        self.cache: Any = scheduler.cache
        self.loop = loop
        self.on_step_failed = on_step_failed
        self.memory_plan = memory_plan
        self.config = runner.model.config
        self.max_len = scheduler.rows.max_len
        self.stats = Stats()
        self._ids = count()
        self.inbox: deque[Callable[[], None]] = deque()
        self._waiting_for_grammar: deque[list[Request]] = deque()  # until it is compiled
        self.outputs: list[Output] = []  # that no step has returned yet
        self.sinks: dict[Request, deque[Output]] = {}  # of streams
        self.step_lock = threading.RLock()  # streams of several threads take turns at steps
        self._marks = ExitStack()
        self._collected = 0.0  # when the newest results came

    # Requests.

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        priority: int = 0,
        salt: str = "",
    ) -> list[Request]:
        """Add a prompt's requests to the waiting queue, from any thread, for the next step to schedule.

        Args:
            prompt: token ids.
            params: with `n > 1` the prompt becomes `n` requests, one for each sample.
            index: the caller's number for the prompt, repeated in its events.
            priority: lower first; read by the policy `policies.priority` alone.
            salt: requests share cached prefixes only with requests of the same salt.

        Returns:
            The `n` requests.

        Raises:
            UserError: an argument is wrong, or can never be served.
        """
        requests = self.prepare(prompt, params, index)
        for request in requests:
            request.priority = integer("priority", priority)
            request.salt = text("salt", salt)
        self.inbox.append(partial(self.enqueue, requests))
        return requests

    def abort(self, request: Request) -> None:
        """End a request at the next step, in whatever state it is; its tokens so far stay.

        Requests that have ended stay as they are. Samples of the same prompt (`n > 1`) that still wait for
        this request to compute the prompt end, too. Any thread may call this.
        """
        self.inbox.append(partial(self._abort, request))

    def prepare(
        self, prompt: Sequence[int], params: SamplingParams, index: int
    ) -> list[Request]:
        """Return the `n` requests of one prompt (token ids), checked; `index` is the caller's number for it.

        Raises:
            UserError: they can never be served.
        """
        ids = check_prompt(
            prompt,
            self.config.vocab_size,
            self.max_len,
            params,
            has_tokenizer=self.tokenizer is not None,
        )
        limit = min(len(prompt) + params.max_tokens, self.max_len)
        self.scheduler.check(len(prompt), limit)
        if params.grammar is not None:
            self.grammar_manager.check(params.grammar)
        now = time.perf_counter()
        requests = []
        for sample in range(params.n):
            request = Request(next(self._ids), list(prompt), len(prompt), limit, params)
            request.index, request.sample = index, sample
            request.arrival, request.numbers = now, ids
            seed = params.seed_of(sample)
            request.seed = random.getrandbits(63) if seed is None else seed
            if self.tokenizer is not None and params.stop:
                request.text = TextStream(self.tokenizer, params, prompt)
            requests.append(request)
        return requests

    def process_inbox(self) -> None:
        """Add and abort what callers have asked for since the last step; a step begins with this."""
        while self.inbox:
            command = self.inbox.popleft()
            command()
        for _ in range(min(len(self._waiting_for_grammar), MOST_LOOKS)):
            requests = self._waiting_for_grammar.popleft()
            self.enqueue([request for request in requests if request.finish_reason is None])

    def enqueue(self, requests: list[Request]) -> None:
        """Give requests to the scheduler, or keep them outside its queue until their grammar is compiled."""
        try:
            manager = self.grammar_manager
            ready = not manager.active or all([manager.ready(request) for request in requests])
        except UserError as error:
            for request in requests:
                self.end(request, "error", error)
            return
        if not ready:
            self._waiting_for_grammar.append(requests)
        elif requests and requests[0].limit > requests[0].prompt_len:
            self.scheduler.add(requests)
        else:  # max_tokens is 0, or all were aborted meanwhile
            for request in requests:
                self.end(request, "length")

    def _abort(self, request: Request) -> None:
        """End a request, and the samples that wait for its prompt, with "abort", unless it has ended."""
        if request.finish_reason is None:
            for member in [request, *request.siblings]:
                if member.finish_reason is None:
                    self.end(member, "abort")

    @property
    def idle(self) -> bool:
        """Return True if a step would have nothing to compute and nothing to report."""
        waits = self.inbox or self._waiting_for_grammar or self.outputs
        return not waits and self.scheduler.idle and self.loop.idle

    # Steps.

    def step(self) -> list[Output]:
        """Run one step for all requests that can take part; return its outputs (tokens, ends of requests).

        Ctrl-C is raised at its end, when no request is half changed; the next step returns these outputs.
        """
        with uninterrupted(), self._marks:
            self.process_inbox()
            self.loop.advance(self)
            if self._waiting_for_grammar and self.scheduler.idle and not self.outputs:
                time.sleep(WAIT)  # no other request has anything to compute
        return self.take_outputs()

    def schedule(self) -> list[Work]:
        """Schedule the next step, and return its works (each the tokens of one request)."""
        works = self.scheduler.schedule()
        if not works and self.loop.idle and not self.scheduler.idle:
            raise AssertionError("requests are left, but the scheduler finds nothing to do")
        self._marks.enter_context(marked(works))
        return works

    def needs_mask(self, works: Sequence[Work]) -> bool:
        """Return True if a request that a step samples follows a grammar; costs nothing until one comes.

        Then all tokens before this step must be known when its masks are made.
        """
        return self.grammar_manager.active and any(
            request.constraint is not None
            for work in works
            for request in work.sampled_requests
        )

    def forward(self, works: list[Work]) -> Forwarded | None:
        """Launch a step's forward pass, and return it unsampled; None if the step is empty or has failed."""
        if not works:
            return None
        self.stats.begin(works, len(self.scheduler.running))
        with self.failing(works):
            return self.runner.forward(works, masked=self.needs_mask(works))
        return None

    def sample(self, step: Forwarded | None) -> Pending | None:
        """Launch the sampling of `step`, and return its results; None if there is no step, or it failed."""
        if step is None:
            return None
        with self.failing(step.works):
            grammars = self.grammar_manager
            masked = self.needs_mask(step.works)
            allowed = grammars.fill_bitmask(step.works) if masked else None
            pending = self.runner.sample(step, allowed)
            if masked:  # what fails ends as if it were aborted now
                for request, why in grammars.pop_failed_requests():
                    if request.finish_reason is None:
                        self.end(request, "error", why)
            return pending
        return None

    def collect(self, pending: Pending) -> None:
        """Wait for the tokens of the step `pending`, and append them; if it fails, its requests end."""
        results = self.wait(pending)
        if results is not None:
            self.append_tokens(pending, results)

    def wait(self, pending: Pending) -> Results | None:
        """Wait for the step `pending`; return the tokens of each sampled request, None if the step failed."""
        with self.failing(pending.works):
            results = pending.get()
            self._collected = time.perf_counter()
            return results
        return None

    def append_tokens(self, pending: Pending, results: Results) -> None:
        """Append a step's tokens (`results`: some for each sampled request); finish it in the scheduler."""
        now = self._collected
        result = iter(results)
        for work in pending.works:
            accepted, ended = 0, []
            for request in work.sampled_requests:
                tokens = next(result)
                if request.finish_reason is None:  # it may have ended meanwhile
                    known = len(request.tokens)
                    if self._receive(request, tokens, now):
                        ended.append(request)
                    accepted = max(0, len(request.tokens) - known - 1)
                    missing = work.drafts_forced and accepted < len(work.drafts)
                    if missing and request.finish_reason is None:
                        error = RuntimeError("a token that was certain to come did not")
                        self.end(request, "error", error)
            self.scheduler.finish_step(work, accepted=accepted)
            for request in ended:
                self.scheduler.leave(request)

    def _receive(self, request: Request, tokens: Sequence[Token], now: float) -> bool:
        """Append sampled tokens to a request until it finishes, with the time `now` in seconds.

        Returns:
            True if the request finished and must release its row.
        """
        for token, logprob in tokens:
            if token == NAN_TOKEN:
                self.runner.attention.wipe(request.row)
                words = "the model's logits for this request are not a number (NaN)"
                self.end(request, "error", NotANumber(words))
                return False
            if not request.params.max_tokens:  # only its prompt was wanted
                self.outputs.append(Output(request, None, "length", now))
                request.finish_reason, request.finished = "length", now
                return True
            request.tokens.append(token)
            if request.first_token is None:
                request.first_token = now
            reason = finish_reason(
                token,
                len(request.tokens) - request.prompt_len,
                request.params,
                self.config.eos_token_ids,
                request.limit - request.prompt_len,
            )
            text = None
            if request.text is not None:
                try:
                    reason, text = request.text.advance(token, reason)
                except Exception as error:  # no other request's tokens may be lost for it
                    log.error("request %d cannot be made a text", request.id, exc_info=error)
                    request.error, reason = error, "error"
            self.outputs.append(Output(request, token, reason, now, logprob, text))
            if reason is not None:
                request.finish_reason, request.finished = reason, now
                return True
        return False

    @contextmanager
    def failing(self, works: Sequence[Work]) -> Iterator[None]:
        """Return a context in which an `Exception` ends the requests of `works`; other errors are raised."""
        try:
            yield
        except BaseException as error:
            self.fail(works, error)
            if not isinstance(error, Exception):
                raise

    def fail(self, works: Sequence[Work], error: BaseException) -> None:
        """End the requests of a step that raised; what they hold is released and nothing is committed.

        Each work of the step is finished with `computed=False`. Then its request, its sampled requests and
        the siblings that wait for its prompt end with "error" and the error, unless they have ended.
        `on_step_failed` is called last.
        """
        log.error("a step failed, and with it %d requests", len(works), exc_info=error)
        for work in works:
            self.scheduler.finish_step(work, computed=False)
            members = (work.request, *work.sampled_requests, *work.request.siblings)
            for request in dict.fromkeys(members):
                if request.finish_reason is None:
                    self.end(request, "error", error)
        self.on_step_failed(error)

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call, in order; those of a stream go to its queue instead."""
        outputs, self.outputs = self.outputs, []
        rest = list[Output]()
        for output in outputs:
            self.sinks.get(output.request, rest).append(output)
        return rest

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the counts of scheduler and cache contradict each other. Slow."""
        self.scheduler.check_integrity()

    def end(
        self, request: Request, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End a request without a further token: it leaves the scheduler, and its last output has the reason.

        error: stored in the request; None keeps its own. The output has text that a stop string held back.
        """
        request.finish_reason, request.finished = reason, time.perf_counter()
        request.error = error or request.error
        self.scheduler.leave(request)
        text = request.text.advance(None, reason)[1] if request.text is not None else None
        self.outputs.append(Output(request, None, reason, request.finished, None, text))

    # For a caller that has nothing else to do.

    stream = streams.stream
    generate = events.generate
