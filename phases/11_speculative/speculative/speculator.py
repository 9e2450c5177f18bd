"""The drafter that an engine sees: a source of guesses, told how far to guess, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from common.request import Request
from continuous.engine import Engine
from continuous.work import Work
from speculative.control import SAMPLES, Control
from speculative.loops import Watcher
from speculative.stats import SpeculationStats

if TYPE_CHECKING:  # there is no Triton everywhere
    from speculative.ahead.steps import Ahead


class Source(Protocol):
    """Where guesses come from. One object serves all requests of an engine.

    One that has `watches = True` has to see every step of a request, from its prompt on, or guesses badly.
    """

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request at most so many token ids that may follow its `tokens`, all of them known."""
        ...

    def landed(self, work: Work, accepted: int) -> None:
        """A step has ended well for a work; its hidden states are in `runner.last`, until the next step."""
        ...

    def leave(self, request: Request) -> None:
        """A request has ended (it has a finish reason) or is preempted."""
        ...


class Speculator(Watcher):
    """Asks a source for as many guesses as pay.

    All guesses of a step are made at once, before anything is scheduled, so that a source may make them in
    batches. A request whose newest token is still on its way is not asked about.

    Args:
        source: of the guesses.
        control: how many.
        clock: in seconds; replaced by tests.

    stats: what came of the guesses.
    ahead: launches steps that draft on the device, if any. in_turn: the device is the host: nothing overlaps.
    """

    def __init__(
        self, source: Source, control: Control, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.source, self.control, self.clock, self.in_turn = source, control, clock, False
        self.stats = SpeculationStats(synthetic=getattr(source, "accept", None))
        self._engine: Engine | None = None
        self._guesses: dict[Request, Sequence[int]] = {}
        self._begun: bool | None = None  # what `begin` would say, if it was asked already
        self.ahead: Ahead | None = None
        self._watches = bool(getattr(source, "watches", False))
        self._on = not control.adaptive or self._watches
        self._steady = True  # the first step after a switch overlaps with the one before, or with none
        self._began: float | None = None
        self._steps = self._decode_steps = 0
        self._rows = self._drafts = self._tokens = 0  # what has landed since the step began
        self._prompts = False  # whether there were tokens of prompts in it

    def attach(self, engine: Engine) -> None:
        """The engine whose steps these are."""
        self._engine, self.in_turn = engine, engine.runner.model.device.type == "cpu"
        if (attach := getattr(self.source, "attach", None)) is not None:
            attach(engine)

    @property
    def waits(self) -> bool:
        """While it guesses, it has to know every token."""
        return self._on

    def begin(self, running: Sequence[Request]) -> bool:
        """Account for the step before; then, if it pays, guess for everybody whose tokens are known."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        self._account()
        self._guesses.clear()
        rows = len(running)
        if not rows:
            self._began = None
            if self._watches and not self._on and self.control.fresh:  # the next request's first step is due
                self._on = self.control.decide(1)
                self.control.fresh = True  # more than one may come, and they have another account
            return False
        before, self._on = self._on, self._decide(rows)
        learning = not self._on and self._watches and self.control.cost(rows).samples < SAMPLES
        self._on |= learning  # plain steps are timed first; what a source has to watch it sees meanwhile
        self._steady = before == self._on
        if learning or not self._on:
            return False
        known = [r for r in running if not (r.placeholders or r.prefilling or r.siblings)]
        requests, lengths = [], []
        for request, length in zip(known, self.control.lengths(known, rows), strict=True):
            room = request.limit - len(request.tokens) - 1  # one token is sampled in any case
            if (most := min(length, room)) > 0:
                requests.append(request)
                lengths.append(most)
        if requests:
            guesses = self.source.guess(requests, lengths)
            for request, length, drafts in zip(requests, lengths, guesses, strict=True):
                self._guesses[request] = drafts[:length]
        return bool(requests)

    def _decide(self, rows: int) -> bool:
        if self._watches:  # what it has not seen from the beginning it guesses badly
            return (self._on or self.control.fresh) and self.control.decide(rows)
        return self.control.decide(rows) and not self.control.resting(rows)

    # For steps that draft on the device; an ordinary step that comes in the place of one asks `begin` again.

    def guesses(self, running: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """What `begin` guesses."""
        self._begun = self.begin(running)
        return self._guesses if self._begun else {}

    def wanted(self, running: Sequence[Request]) -> int:
        """How many drafts of a request pay in the next step, if they cost the host nothing."""
        self._account()
        self._guesses.clear()
        self._begun = False
        before, self._on = self._on, self._decide(len(running))
        self._steady = before == self._on
        return max(self.control.lengths(running, len(running))) if self._on else 0

    def went_ahead(self) -> None:
        """No ordinary step comes in its place."""
        self._begun = None

    def came_back(self) -> None:
        """An ordinary step does; two will have landed when it is accounted for, which is no measure."""
        self._steady = False

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """What was guessed for it, cut to what there is room for."""
        return self._guesses.get(request, ())[:most]

    def landed(self, work: Work, accepted: int) -> None:
        """Learn from a work, while it `waits`."""
        if not (work.drafts or self._on):
            return
        self._rows += 1
        self._drafts += len(work.drafts)
        self._tokens += accepted + 1
        self._prompts |= work.count > 1 + len(work.drafts) or len(work.takers) != 1
        if work.drafts:
            self.stats.count(work, accepted)
            if work.request.finish_reason is None:  # or the end cut it short, and says nothing
                self.control.saw(work.request, len(work.drafts), accepted)
        if self.ahead is None or not self.ahead.landed(work):
            self.source.landed(work, accepted)

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self._guesses.pop(request, None)
        self.control.leave(request)
        self.source.leave(request)

    def _account(self) -> None:
        """Tell the control what the step before took, if it was one of decodes alone."""
        began, self._began = self._began, (now := self.clock())
        rows, drafts, tokens, prompts = self._rows, self._drafts, self._tokens, self._prompts
        self._rows, self._drafts, self._tokens, self._prompts = 0, 0, 0, False
        if (engine := self._engine) is None or not self.control.adaptive:
            return
        steps, decodes = engine.stats.steps - self._steps, engine.stats.decode_steps - self._decode_steps
        self._steps, self._decode_steps = engine.stats.steps, engine.stats.decode_steps
        if began is None or steps != 1 or not self._steady:
            return
        if self._on and rows and not prompts:
            cost = self.control.cost(rows)
            if not drafts and (self.in_turn or cost.samples < SAMPLES):
                cost.saw_plain(now - began, waited=cost.samples < SAMPLES)
                cost.unsure *= not self.in_turn
                return
            cost.saw_drafts(min(now - began, cost.longest(rows, drafts)), rows, drafts, tokens)
            # Other steps without drafts have waited for the one before, which steps with guessing off do not.
            if not drafts and self.control.refreshing(rows):
                cost.plain = max(cost.plain, min(now - began, 1.02 * cost.plain))
        elif not self._on and decodes == 1:
            self.control.cost(len(engine.scheduler.running)).saw_plain(now - began)
