"""Notes from the engine's process: drafts and forced tokens, when a request got its row, pictures."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from common.request import Request
from continuous.engine import Engine
from phases.appendix.guidance.masks import ThreadedMasks
from phases.appendix.observability.picture import picture
from serving.messages import DRAFT, FORCED, AddPrompt, Command, StepReport, WatchEngine
from serving.seams import Observer, ServedEngine

log = logging.getLogger(__name__)


class EngineObserver(Observer):
    """Writes marks, entries and pictures into the reports of those who asked; nothing else costs anything."""

    def __init__(self, engine: ServedEngine) -> None:
        super().__init__(engine)
        log_late_kernels()
        self.marks = Marks(engine)
        self.seconds, self._drawn = 0.0, 0.0
        self._lined: dict[int, Request] = {}  # traced, and without a row so far

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        match command:
            case WatchEngine():
                self.seconds, self._drawn = command.seconds, 0.0
            case AddPrompt():
                if command.traced:
                    self._lined[command.first] = requests[0]
                if command.marks:
                    self.marks.follow(range(command.first, command.first + len(requests)), requests)

    def due(self, now: float) -> bool:
        """Tell if a picture is asked for, and the last one is old enough."""
        return self.seconds > 0.0 and now - self._drawn >= self.seconds

    def write(self, step: StepReport, now: float) -> None:
        """See `Observer`."""
        if self._lined:
            served = {n for n, r in self._lined.items() if r.row >= 0 or len(r.tokens) > r.prompt_len}
            step.entered = sorted(served)
            gone = {n for n, r in self._lined.items() if r.finish_reason is not None}
            self._lined = {n: r for n, r in self._lined.items() if n not in served | gone}
        self.marks.write(step)
        if self.due(now):
            self._drawn = now
            step.picture = picture(self.engine)


def log_late_kernels() -> None:
    """Log each kernel that is compiled from now on: the rehearsal has left it out, and requests wait."""

    def note(**facts: Any) -> None:
        log.warning("a kernel was compiled while requests waited: %s", facts.get("repr"))

    triton: Any = sys.modules.get("triton")  # an engine without kernels does without
    if triton is not None:
        triton.knobs.runtime.jit_post_compile_hook = note


class Marks:
    """Marks of the tokens of completions that are followed.

    A step gives a request the drafts that were right, and one token more. So of several tokens in one step
    all but the last were drafts.
    """

    def __init__(self, engine: object) -> None:
        masks = engine.masks if isinstance(engine, Engine) else None
        self._single = masks.single if isinstance(masks, ThreadedMasks) else {}
        self._followed: dict[int, Request] = {}
        self._told: dict[int, int] = {}

    def follow(self, numbers: Iterable[int], requests: Iterable[Request]) -> None:
        """Mark the tokens of these completions from now on."""
        for number, request in zip(numbers, requests, strict=True):
            self._followed[number], self._told[number] = request, 0
            self._single[request] = set()

    def write(self, step: StepReport) -> None:
        """Add the marks of a step to its report, and forget the completions that have ended."""
        if not self._followed:
            return
        last = {number: place for place, number in enumerate(step.numbers)}
        for place, number in enumerate(step.numbers):
            request = self._followed.get(number)
            if request is None:
                continue
            if self._told[number] in self._single[request]:
                step.marks.append((place, FORCED))
            elif place < last[number]:
                step.marks.append((place, DRAFT))
            self._told[number] += 1
        for end in step.ends:
            request = self._followed.pop(end.number, None)
            if request is not None:
                del self._told[end.number], self._single[request]
