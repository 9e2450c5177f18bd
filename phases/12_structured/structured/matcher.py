"""The interface of a grammar backend: it compiles grammars, and its matchers make the masks of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.sampling.grammar import Grammar
from structured.vocabulary import Vocabulary

Words = NDArray[np.int32]
"""Masks `[..., ceil(V / 32)]`: bit i of word w is set if token 32 * w + i is allowed."""


class Matcher(ABC):
    """Interface of what follows one output through its grammar, token by token.

    A mask has an end token where the output may end. `advance` never accepts one, so drafts stop before it.
    """

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Write the bit mask of the tokens that may come next into `words`, int32 `[ceil(V / 32)]`."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> int:
        """Accept token ids before the first that is forbidden or ends the output; return their number."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that `advance` accepted."""

    @property
    def problem(self) -> str:
        """Return why this output cannot be followed any further, as an error text; "" if it can."""
        return ""


class Compiled(ABC):
    """Interface: a grammar compiled for one vocabulary; many outputs share it.

    Only the engine's thread uses it. bytes: an estimate of its memory.
    """

    bytes: int

    @abstractmethod
    def matcher(self) -> Matcher:
        """Return a new matcher, which follows one output from its first token on."""


class Backend(ABC):
    """Interface of a compiler of grammars for a vocabulary, the model's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, grammar: Grammar) -> Compiled:
        """Return a compiled grammar, from which each output gets a matcher; several threads call this.

        Raises:
            UserError: the grammar is wrong, too large, or asks for what this backend does not know.
        """
