"""Times the steps of an engine for the control, and asks it how far to guess in the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.request import Request
from continuous.engine import Engine
from continuous.work import Work
from speculative.control import DraftController


@dataclass
class Seen:
    """Works that have landed since a step began. prompts: tokens of a prompt were among them."""

    rows: int = 0
    drafts: int = 0
    tokens: int = 0
    prompts: bool = False


class DraftThrottle:
    """Knows what each step took.

    Args:
        control: learns from it.
        clock: in seconds.
        watches: guesses come from a source that has to see every step of a request, from its prompt on.

    on: guesses are made, or steps are watched; then every token must be known before a step is scheduled.
    """

    def __init__(
        self, control: DraftController, clock: Callable[[], float], *, watches: bool
    ) -> None:
        self.control = control
        self.clock = clock
        self.watches = watches
        self.on = not control.adaptive or watches
        self.in_turn = False  # the device is the host, so that steps never overlap
        self._engine: Engine | None = None
        self._fresh = True  # a request may come whose prompt can be watched
        self._began: float | None = None
        self._steps = self._decodes = 0
        self._landed = Seen()

    def attach(self, engine: Engine) -> None:
        """Meet the engine whose steps these are."""
        self._engine, self.in_turn = engine, engine.runner.model.device.type == "cpu"

    def lengths(self, running: Sequence[Request]) -> list[int]:
        """Account for the step before, and return how many drafts of each request pay in the next."""
        rows, before = len(running), self.on
        self._measure(rows)
        self.on = self._decide(rows)
        if self.on != before or not rows:
            self.skip()
        if not self.on or self.control.times_plain(
            rows, refresh=self.in_turn or not self.watches
        ):
            return [0] * rows
        return self.control.lengths(running, rows)

    def skip(self) -> None:
        """Take no measure of this step, which overlaps with only one of its neighbours."""
        self._began = None

    def saw(self, work: Work, accepted: int) -> None:
        """Count a work that has landed."""
        seen = self._landed
        seen.rows += 1
        seen.drafts += len(work.drafts)
        seen.tokens += accepted + 1
        seen.prompts |= work.count > 1 + len(work.drafts) or len(work.sampled_requests) != 1

    def left(self) -> None:
        """A request has ended, and another may come."""
        self._fresh = True

    def _decide(self, rows: int) -> bool:
        """Return True if the next step may have drafts, or has to be watched.

        While nothing runs, that is the step with the next request's prompt.
        """
        if not self.watches:
            return (
                self.control.decide(rows) and not self.control.times_plain(rows)
                if rows
                else self.on
            )
        fresh, self._fresh = self._fresh, self._fresh and not rows
        if not (fresh or self.on) or (fresh and self.control.cost(rows).waited):
            return False
        return self.control.decide(rows) or self.control.times_plain(rows, refresh=False)

    def _measure(self, rows: int) -> None:
        """Tell the control what the step before took, if it was one of decodes alone."""
        began, self._began = self._began, self.clock()
        seen, self._landed = self._landed, Seen()
        if self._engine is None or not self.control.adaptive:
            return
        steps = self._steps
        decodes = self._decodes
        stats = self._engine.stats
        self._steps, self._decodes = stats.steps, stats.decode_steps
        if began is None or stats.steps != steps + 1:
            return
        seconds = self._began - began
        if not self.on:
            if stats.decode_steps == decodes + 1:
                self.control.cost(rows).saw_plain(seconds)
        elif seen.rows and not seen.prompts:
            cost = self.control.cost(seen.rows)
            if seen.drafts or not (
                self.in_turn or self.control.times_plain(seen.rows, refresh=False)
            ):
                cost.saw_drafts(seconds, seen.rows, seen.drafts, seen.tokens)
            else:
                cost.saw_plain(seconds, waited=not self.in_turn)
