"""Notes from the engine's process: drafts and forced tokens, pictures."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from common.request import Request
from continuous.engine import Engine
from phases.appendix.guidance.masks import ThreadedMasks
from phases.appendix.observability.picture import picture
from serving.messages import MARKS, AddPrompt, Command, DrawEngine, StepReport
from serving.worker import Observer

log = logging.getLogger(__name__)

DRAFT, FORCED = "draft", "forced"
"""How a token came about, where that is worth a word: a right guess; the only one that a grammar allowed."""


class EngineObserver(Observer):
    """Writes marks and pictures into the reports of those who asked; nothing else costs anything."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        log_late_kernels()
        self.marks = Marks(engine)
        self._draws = False

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        match command:
            case DrawEngine():
                self._draws = True
            case AddPrompt() if MARKS in command.wanted:
                self.marks.follow(range(command.first, command.first + len(requests)), requests)

    def due(self) -> bool:
        """Tell if a picture is asked for."""
        return self._draws

    def write(self, step: StepReport, now: float) -> None:
        """See `Observer`."""
        self.marks.write(step)
        if self._draws:
            self._draws, step.picture = False, picture(self.engine)


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
        self._followed: dict[int, tuple[Request, int]] = {}  # and how many tokens have a mark

    def follow(self, numbers: Iterable[int], requests: Iterable[Request]) -> None:
        """Mark the tokens of these completions from now on."""
        for number, request in zip(numbers, requests, strict=True):
            self._followed[number] = request, 0
            self._single[request] = set()

    def write(self, step: StepReport) -> None:
        """Add the marks of a step to its report, and forget the completions that have ended."""
        for number in self._followed.keys() & step.numbers:
            (request, told), count = self._followed[number], step.numbers.count(number)
            marks = [DRAFT] * (count - 1) + [""]
            for place in range(count):
                if told + place in self._single[request]:
                    marks[place] = FORCED
            step.notes.append((number, MARKS, marks))
            self._followed[number] = request, told + count
        for end in step.ends:
            if end.number in self._followed:
                del self._single[self._followed.pop(end.number)[0]]
