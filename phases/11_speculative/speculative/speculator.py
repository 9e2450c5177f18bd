"""The drafter that an engine sees: a source of guesses, told how far to guess, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common.request import Request
from continuous.engine import Engine
from continuous.seams import Drafter
from continuous.work import Work
from speculative.control import Control
from speculative.stats import SpeculationStats


class Source(Protocol):
    """Where guesses come from. One object serves all requests of an engine."""

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request at most so many token ids that may follow its `tokens`, all of them known."""
        ...

    def landed(self, work: Work, accepted: int) -> None:
        """A step has ended well for a work; its hidden states are in `runner.last`, until the next step."""
        ...

    def leave(self, request: Request) -> None:
        """A request has ended (it has a finish reason) or is preempted."""
        ...


class Speculator(Drafter):
    """Asks a source for as many guesses as pay.

    All guesses of a step are made at once, before anything is scheduled, so that a source may make them in
    batches. A request whose newest token is still on its way is not asked about.

    Args:
        source: of the guesses.
        control: how many.
        clock: in seconds; replaced by tests.

    stats: what came of the guesses.
    """

    def __init__(
        self, source: Source, control: Control, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.source, self.control, self.clock = source, control, clock
        self.stats = SpeculationStats()
        self._engine: Engine | None = None
        self._guesses: dict[Request, Sequence[int]] = {}
        self._on = not control.adaptive
        self._steady = True  # the first step after a switch overlaps with the one before, or with none
        self._began: float | None = None
        self._steps = self._decode_steps = 0
        # What has landed since the step began: requests, drafts, tokens, and whether prompts were in it.
        self._rows = self._drafts = self._tokens = 0
        self._prompts = False

    def attach(self, engine: Engine) -> None:
        """The engine whose steps these are."""
        self._engine = engine
        attach = getattr(self.source, "attach", None)
        if attach is not None:
            attach(engine)

    @property
    def waits(self) -> bool:
        """While it guesses, it has to know every token."""
        return self._on

    def begin(self, running: Sequence[Request]) -> bool:
        """Account for the step before; then, if it pays, guess for everybody whose tokens are known."""
        self._account()
        self._guesses.clear()
        rows = len(running)
        if not rows:
            self._began = None
            return False
        before, self._on = self._on, self.control.decide(rows)
        self._steady = before == self._on
        if not self._on:
            return False
        requests, lengths = [], []
        for request in running:
            if request.placeholders or request.prefilling or request.siblings:
                continue
            left = request.limit - len(request.tokens) - 1  # one token is sampled in any case
            length = min(left, self.control.length(request, rows))
            if length > 0:
                requests.append(request)
                lengths.append(length)
        if requests:
            guesses = self.source.guess(requests, lengths)
            for request, length, drafts in zip(requests, lengths, guesses, strict=True):
                self._guesses[request] = drafts[:length]
        return bool(requests)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """What was guessed for it, cut to what there is room for."""
        return self._guesses.get(request, ())[:most]

    def landed(self, work: Work, accepted: int) -> None:
        """Learn from a work; called while it `waits`."""
        self._rows += 1
        self._drafts += len(work.drafts)
        self._tokens += accepted + 1
        self._prompts |= work.count > 1 + len(work.drafts) or len(work.takers) != 1
        if work.drafts:
            self.stats.count(work, accepted)
            if work.request.finish_reason is None:  # or the end cut it short, and says nothing
                self.control.saw(work.request, len(work.drafts), accepted)
        self.source.landed(work, accepted)

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self._guesses.pop(request, None)
        self.control.leave(request)
        self.source.leave(request)

    def _account(self) -> None:
        """Tell the control what the step before took, if it was one of decodes alone."""
        now, began = self.clock(), self._began
        self._began = now
        rows, drafts, tokens, prompts = self._rows, self._drafts, self._tokens, self._prompts
        self._rows = self._drafts = self._tokens = 0
        self._prompts = False
        engine = self._engine
        if engine is None or not self.control.adaptive:
            return
        steps, decodes = engine.stats.steps - self._steps, engine.stats.decode_steps - self._decode_steps
        self._steps, self._decode_steps = engine.stats.steps, engine.stats.decode_steps
        if began is None or steps != 1 or not self._steady:
            return
        if self._on and rows and not prompts:
            cost = self.control.cost(rows)
            most = cost.plain * (3 + drafts / rows)  # beyond that it was interrupted by something else
            cost.saw_drafts(min(now - began, most), rows, drafts, tokens)
            if not drafts:
                cost.plain = max(cost.plain, min(now - began, 1.02 * cost.plain))
        elif not self._on and decodes == 1:
            self.control.cost(len(engine.scheduler.running)).saw_plain(now - began)
