"""The interface between an engine and its grammars: what a backend implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.sampling.grammar import Grammar
from structured.vocabulary import Vocabulary

Words = NDArray[np.int32]
"""A mask, or several: bit i of word w belongs to token 32 * w + i."""


class Matcher(ABC):
    """The place of one output in its grammar.

    An end-of-sequence token is in the mask where the output may end. `advance` never takes one, so drafts end
    before it. What `advance` has taken, `rollback` gives back.
    """

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
    def problem(self) -> str:
        """The limit at which this grammar cannot be followed any further; empty if it can."""
        return ""


class Compiled(ABC):
    """A grammar made ready for one vocabulary. Many outputs share it, in the engine's thread.

    bytes: about how much memory it takes.
    """

    bytes: int

    @abstractmethod
    def matcher(self) -> Matcher:
        """Return the matcher of a new output, at the start."""


class Backend(ABC):
    """Compiles grammars for a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, grammar: Grammar) -> Compiled:
        """Make a grammar ready. Raises `UserError` for one that is wrong, too large, or not understood."""
