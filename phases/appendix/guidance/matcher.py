"""One output in llguidance's parser, and the budget for following its grammar."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llguidance as ll

from structured.matcher import Matcher, Words

SLOW = 0.005
DEAREST = 0.05
MOST_SLOW = 0.15
"""Seconds of processor time: a token that takes more is slow; no token may take so long; and no output's slow
tokens together. Masks of ordinary grammars take 0.02 to 1 ms over 49,152 tokens, those of the dearest regular
expression tried 5 ms. An ambiguous grammar's grow with the square of the output's length."""


class Effort:
    """The budget of an output for following its grammar, which may be cheap to compile and dear to follow.

    watched: a call for several outputs was slow, so that each has to be timed by itself.
    """

    def __init__(self) -> None:
        self.slow = 0.0
        self.watched = False
        self.problem = ""

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


class GuidanceMatcher(Matcher):
    """A `Matcher` of the library.

    lexer: the number of the lexer, which one thread at a time may use, and which some outputs share.
    eos: the tokens that end an output.
    effort: the processor time of masks and tokens.
    certain: what `forced` said when masks were last made, if a drafter may ask for it.
    """

    certain: Sequence[int] = ()

    def __init__(self, inner: ll.LLMatcher, lexer: int, eos: Sequence[int]) -> None:
        self.inner = inner
        self.lexer = lexer
        self.eos = eos
        self.effort = Effort()

    def fill(self, words: Words) -> None:
        """See `Matcher`; so are the others."""
        with self.effort.timed():
            self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def advance(self, tokens: Sequence[int]) -> int:
        """Tokens that are not allowed leave the matcher as it is."""
        with self.effort.timed():
            return self.inner.try_consume_tokens(self._before_end(tokens))

    def rollback(self, count: int) -> None:
        """The parser keeps its rows."""
        if count:
            self.inner.rollback(count)

    @property
    def problem(self) -> str:
        """The first line of what the library says, or the budget that is used up."""
        return (
            self.inner.get_error().split("\n")[0][:200]
            if self.inner.is_error()
            else self.effort.problem
        )

    def forced(self) -> Sequence[int]:
        """Return tokens that must come next, as far as the grammar leaves no choice; changes nothing.

        The mask in front of each allows it alone.
        """
        return self.inner.compute_ff_tokens()

    def agrees(self, tokens: Sequence[int]) -> int:
        """Count the tokens that `advance` would take; changes nothing."""
        return self.inner.validate_tokens(self._before_end(tokens))

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Cut tokens before one that ends the output, which the library takes in some places only."""
        end = next(
            (place for place, token in enumerate(tokens) if token in self.eos), len(tokens)
        )
        return list(tokens[:end])


Job = tuple[GuidanceMatcher, int, Sequence[int]]
"""Masks to be made: of a matcher's next token into a row, and after each draft into the rows behind. Every
draft is one that the matcher agrees with."""
