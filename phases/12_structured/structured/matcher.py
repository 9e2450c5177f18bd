"""What an engine asks of a grammar. Whoever can answer this is a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
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


class Matcher(ABC):
    """Where one output stands in its grammar.

    An end-of-sequence token is allowed where the output may end; after it nothing is asked any more.

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
        """Take tokens up to the first that the grammar does not allow; returns how many."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the output may end here."""

    @property
    def problem(self) -> str:
        """Why this grammar cannot be followed any further (a limit was hit); empty if it can."""
        return ""

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, as far as the grammar leaves no choice; changes nothing."""
        return ()

    def prepare(self) -> None:
        """Make the next mask before anybody asks for it, if a trial of this grammar ever lasts."""
        raise NotImplementedError

    def agrees(self, tokens: Sequence[int]) -> int:
        """How many of these could come next; changes nothing."""
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
