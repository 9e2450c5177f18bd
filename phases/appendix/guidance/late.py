"""Outputs whose masks take long sit out steps, so that nobody else waits for these masks.

A step's second half waits for the masks of all its outputs, and one that takes four milliseconds holds up
everybody in a step of two. Nobody can tell from a grammar how long its masks will take: some have to look at
every token of the vocabulary. But a mask can be made between two steps, by a thread of its own. An output of
a doubtful grammar takes part in a step when its mask is there, which is each third step or so.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from common.request import Request
from common.sampling.grammar import Grammar
from paged_cache import PagedEngine
from phases.appendix.guidance.masks import EarlyConstraint, ThreadedMasks
from structured.pool import step_back

AT_ONCE = 8
"""Masks of one grammar that are on their way, at most: as many as decide whether it is quick."""


def let_late_ones_wait(engine: PagedEngine) -> None:
    """Leave those out of the order of an engine's steps whose masks are not there yet.

    Not where all are such: then nobody else waits. And not where processes must come to the same order: none
    knows how far another's threads are.
    """
    if isinstance(engine.masks, ThreadedMasks):
        order, late = engine.scheduler.order, Late()

        def without_late(running: list[Request]) -> list[Request]:
            queue = order(running)
            constraints = cast("list[EarlyConstraint | None]", [request.constraint for request in queue])
            if not any([one is not None and one.matcher.trial.left for one in constraints]):
                return queue  # nearly always, and asked of everybody in every step
            return [request for request in queue if not late.has(request)] or queue

        engine.scheduler.order = without_late  # type: ignore[method-assign]


class Late:
    """The outputs that wait for a mask, and the thread that makes it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="late masks", initializer=step_back)
        self._making: Counter[Grammar | None] = Counter()
        self._lock = threading.Lock()

    def has(self, request: Request) -> bool:
        """Tell whether a request's next mask may take long, and is not there; perhaps the thread makes it."""
        constraint = request.constraint
        if not isinstance(constraint, EarlyConstraint) or request.prefilling:
            return False
        if constraint.making is not None and not constraint.making.done():
            return True
        if not constraint.matcher.trial.left:
            return False
        if request.placeholders:  # its newest token is on its way
            return True
        if constraint.known == len(request.tokens):  # whether or not that went well: the step will tell
            return False
        grammar = request.params.grammar
        with self._lock:
            if self._making[grammar] < AT_ONCE:
                self._making[grammar] += 1
                constraint.known, new = len(request.tokens), constraint.unseen(request)
                constraint.making = self._thread.submit(self._make, constraint, new, grammar)
        return True

    def _make(self, constraint: EarlyConstraint, new: list[int], grammar: Grammar | None) -> None:
        try:
            if not new or not constraint.moved(new, constraint.matcher.advance(new)):
                constraint.matcher.prepare()
        finally:
            with self._lock:
                self._making -= Counter([grammar])
