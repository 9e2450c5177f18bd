"""The matcher of one output by llguidance's parser, and its budget of processor time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import llguidance as ll

from structured.matcher import Matcher, Words

SLOW = 0.005
SLOWEST = 0.05
MOST_SLOW = 0.15
"""Seconds of processor time: from which a token counts as slow; the most for one token; and the most for all
slow tokens of an output. A mask of an ordinary grammar takes 0.02 to 1 ms with 49,152 tokens, of the slowest
regular expression tried 5 ms. For an ambiguous grammar it grows with the square of the output's length."""


@dataclass
class Effort:
    """Processor time that one output spends on its grammar; too much of it ends the output.

    Some grammars compile fast and are slow to follow.

    slow: seconds of processor time of tokens that took more than `SLOW`, in all.
    watched: whether each call has to be timed by itself, because a call for several outputs was slow.
    problem: why the output cannot go on; empty while it is within the limits.
    """

    slow: float = 0.0
    watched: bool = False
    problem: str = ""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure this thread's processor time in a `with` block that handles one token.

        `problem` is set if the token, or all slow tokens of the output, took too long.
        """
        begun = time.thread_time()
        yield
        seconds = time.thread_time() - begun
        if seconds > SLOW:
            self.watched = True
            self.slow += seconds
            if seconds > SLOWEST or self.slow > MOST_SLOW:
                self.problem = (
                    f"it is too slow: a token may take {SLOWEST * 1e3:g} ms, and all that take more than "
                    f"{SLOW * 1e3:g} ms may take {MOST_SLOW:g} s; fewer ways to read the same text are faster"
                )


@dataclass(eq=False)
class GuidanceMatcher(Matcher):
    """The state of one output in its grammar: a `Matcher` by a parser of llguidance.

    inner: the parser. eos: ids of the tokens that end an output.
    lexer: number of the parser's lexer, which some outputs share and only one thread at a time may use.
    effort: processor time of the output's masks and tokens.
    drafts: whether tokens can be tried and undone; the library cannot undo all grammars' tokens.
    certain: forced tokens, noted before the last masks were made; empty if no drafter may ask for them.
    """

    inner: ll.LLMatcher
    lexer: int
    eos: Sequence[int]
    drafts: bool = True
    certain: Sequence[int] = ()
    effort: Effort = field(default_factory=Effort)

    def fill(self, words: Words) -> None:
        """Write the bit mask of tokens that may come next into `words`, int32 `[ceil(V / 32)]`."""
        self.effort.watched = False
        with self.effort.timed():
            self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def advance(self, tokens: Sequence[int]) -> int:
        """Accept the `tokens` before the first that is forbidden or ends the output; return their number."""
        with self.effort.timed():
            return self.inner.try_consume_tokens(self._before_end(tokens))

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that `advance` accepted."""
        if count:
            self.inner.rollback(count)

    @property
    def problem(self) -> str:
        """Return why the output cannot be followed further: llguidance's error, or a used-up time limit.

        An empty string: it can.
        """
        return (
            self.inner.get_error().split("\n")[0][:200]
            if self.inner.is_error()
            else self.effort.problem
        )

    def forced(self) -> Sequence[int]:
        """Return the ids of the tokens that must come next, as far as the grammar leaves no choice.

        Nothing if they could not be undone. The matcher does not change. The mask before each of these
        tokens allows that token alone.
        """
        with self.effort.timed():
            return self.inner.compute_ff_tokens() if self.drafts else ()

    def agrees(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first on, `advance` would accept and `rollback` undo."""
        return self.inner.validate_tokens(self._before_end(tokens)) if self.drafts else 0

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Return `tokens` up to, and without, the first end token, which llguidance itself might accept."""
        end = next((at for at, token in enumerate(tokens) if token in self.eos), len(tokens))
        return list(tokens[:end])


Job = tuple[GuidanceMatcher, int, Sequence[int]]
"""Masks to be made: (matcher, row, drafts). The mask of the next token goes into that row, those behind the
drafts into the rows below. The matcher would accept all of the drafts."""
