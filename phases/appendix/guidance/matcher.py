"""Matchers of a fast library: budgets, forced tokens, masks by threads."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from structured.matcher import Backend, Matcher, Words

LONG_MASK, FIRST, TRIAL = 0.001, 3, 8
"""Seconds, and masks. The first masks of a grammar with patterns are made one by one and timed. If one takes
long, all are, until so many in a row were quick."""


class Trial:
    """A trial of whether the masks of a grammar are quick, as far as that is known.

    words: of a mask. left: masks that are still to be timed.
    """

    def __init__(self, words: int, first: int = FIRST) -> None:
        self.words, self.left = words, first

    def timed(self, seconds: float) -> None:
        """A mask took so long."""
        self.left = TRIAL if seconds > LONG_MASK else max(0, self.left - 1)


SLOW, DEAREST, MOST_SLOW = 0.005, 0.05, 0.15
"""Seconds of processor time: a token that takes more is slow; no token may take so long; and no output's slow
tokens together. Masks of ordinary grammars take 0.02 to 1 ms over 49,152 tokens, those of the dearest regular
expression tried 5 ms. An ambiguous grammar's grow with the square of the output's length."""


class Effort:
    """The budget of an output for following its grammar, which may be cheap to compile and dear to follow.

    watched: a call for several outputs was slow, so that each has to be timed by itself.
    """

    def __init__(self) -> None:
        self.slow, self.watched, self.problem = 0.0, False, ""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Book the processor time of this thread for one token; over the budget there is a `problem`."""
        begun = time.thread_time()
        yield
        seconds = time.thread_time() - begun
        self.watched = seconds > SLOW
        if self.watched:
            self.slow += seconds
            if seconds > DEAREST or self.slow > MOST_SLOW:
                self.problem = (
                    f"it is too dear: a token may take {DEAREST * 1e3:g} ms, and all that take more than "
                    f"{SLOW * 1e3:g} ms may take {MOST_SLOW:g} s; fewer ways to read the same text are faster"
                )


class FastMatcher(Matcher):
    """A `Matcher` of a library.

    group: matchers of the same group share something that one thread at a time may use.
    trial: of its grammar; while it lasts, nobody else should wait for these masks.
    """

    group: int = 0
    trial = Trial(0, 0)

    def forced(self) -> Sequence[int]:
        """Return tokens that must come next, as far as the grammar leaves no choice; changes nothing."""
        return ()

    @abstractmethod
    def prepare(self) -> None:
        """Make the next mask before anybody asks for it."""

    def agrees(self, tokens: Sequence[int]) -> int:
        """Count the tokens that `advance` would take; changes nothing."""
        count = self.advance(tokens)
        self.rollback(count)
        return count


class Job(NamedTuple):
    """Masks to be made: of a matcher's next token into `row`, and after each draft into the rows behind."""

    matcher: FastMatcher
    row: int
    drafts: Sequence[int]


class FastBackend(Backend):
    """A `Backend` that moves many matchers, and makes many masks, at a time."""

    def advance(self, moves: Sequence[tuple[Matcher, Sequence[int]]]) -> list[int]:
        """Call `Matcher.advance` of many matchers."""
        return [matcher.advance(tokens) if tokens else 0 for matcher, tokens in moves]

    def begin(self, jobs: Sequence[Job], words: Words) -> Future[None] | None:
        """Begin to `fill`, in threads; None: it is done. No matcher of these may be used until it is."""
        self.fill(jobs, words)
        return None

    def fill(self, jobs: Sequence[Job], words: Words) -> None:
        """Fill the rows of `words [M, ceil(V / 32)]`; every draft is one that its matcher agrees with."""
        for matcher, row, drafts in jobs:
            matcher.fill(words[row])
            for place, draft in enumerate(drafts, start=1):
                matcher.advance((draft,))
                matcher.fill(words[row + place])
            matcher.rollback(len(drafts))

    def waited(self, jobs: Sequence[Job], seconds: float) -> None:
        """Hear that a step has waited so long for these masks."""
        return
