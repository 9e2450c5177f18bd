"""The interface between an engine and its grammars: what a backend implements."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.sampling.grammar import Grammar
from structured.vocabulary import Vocabulary

Words = NDArray[np.int32]
"""A mask, or several: bit i of word w belongs to token 32 * w + i."""


LONG_MASK, FIRST, TRIAL = 0.001, 3, 8
"""Seconds, and masks. The first masks of a grammar with patterns are made one by one and timed. If one takes
long, all are, until so many in a row were quick."""


class Trial:
    """Whether the masks of a grammar are quick, as far as that is known.

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


class Matcher(ABC):
    """The place of one output in its grammar.

    An end-of-sequence token is in the mask where the output may end. `advance` never takes one, so `agrees`
    does not count one either, and drafts end before it. What `advance` has taken, `rollback` gives back.

    group: matchers of the same group share something that one thread at a time may use.
    trial: of its grammar; while it lasts, nobody else should wait for these masks.
    """

    group: int = 0
    trial = Trial(0, 0)

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Write the mask of the next token, `[ceil(V / 32)]`."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first that is not allowed or that ends the output; return how many."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Give back the last `count` of the tokens that `advance` has taken."""

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the output may end here."""

    @property
    def problem(self) -> str:
        """The limit at which this grammar cannot be followed any further; empty if it can."""
        return ""

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, as far as the grammar leaves no choice; changes nothing."""
        return ()

    def prepare(self) -> None:
        """Make the next mask before anybody asks for it, if a trial of this grammar ever lasts."""
        raise NotImplementedError

    def agrees(self, tokens: Sequence[int]) -> int:
        """Count the tokens that `advance` would take; changes nothing."""
        count = self.advance(tokens)
        self.rollback(count)
        return count


class Compiled(ABC):
    """A grammar made ready for one vocabulary. Many outputs share it, in any threads.

    bytes: about how much memory it takes.
    """

    bytes: int

    @abstractmethod
    def matcher(self) -> Matcher:
        """A new output's."""

    def soon(self) -> Matcher | None:
        """A new output's, for somebody who must not wait; None: it is being made, ask again."""
        return self.matcher()


def allows_one(words: Words) -> bool:
    """Whether a mask allows one token."""
    (used,) = np.nonzero(words)
    return len(used) == 1 and (int(words[used[0]]) & 0xFFFFFFFF).bit_count() == 1


class Job(NamedTuple):
    """Masks to be made: of a matcher's next token into `row`, and after each draft into the rows behind."""

    matcher: Matcher
    row: int
    drafts: Sequence[int]


class Backend(ABC):
    """Compiles grammars for a vocabulary and fills masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, grammar: Grammar) -> Compiled:
        """Make a grammar ready. Raises `UserError` for one that is wrong, too large, or not understood."""

    def advance(self, moves: Sequence[tuple[Matcher, Sequence[int]]]) -> list[int]:
        """`Matcher.advance` for many matchers."""
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
        """A step has waited so long for these masks."""
        return
