"""How tokens came about, for those who want to see it: right guesses, and what a grammar forced."""

from __future__ import annotations

from collections.abc import Iterable

from common.request import Request
from serving.messages import DRAFT, FORCED, Step
from structured.masks import GrammarMasks


class Marks:
    """Follows the completions that asked; everybody else costs nothing.

    A step gives a request the drafts that were right, and one token more. So of several tokens in one step
    all but the last were drafts.
    """

    def __init__(self, engine: object) -> None:
        masks = getattr(engine, "masks", None)
        self._single = masks.single if isinstance(masks, GrammarMasks) else {}
        self._followed: dict[int, Request] = {}
        self._told: dict[int, int] = {}

    def follow(self, numbers: Iterable[int], requests: Iterable[Request]) -> None:
        """These want marks."""
        for number, request in zip(numbers, requests, strict=True):
            self._followed[number], self._told[number] = request, 0
            self._single[request] = set()

    def write(self, step: Step) -> None:
        """Add the marks of a step to its report, and forget who has ended."""
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
