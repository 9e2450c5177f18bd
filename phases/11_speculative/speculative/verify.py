"""Verification: a step computes the drafts behind a request's newest token, and keeps those that are right.

Every draft's place is sampled as it would be without drafts, by the same random number. So a draft is right
if it is what was sampled in its place, and the text is what it would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from continuous.batch import upload
from continuous.engine import Engine
from continuous.runner import OneToken, Results, Token
from continuous.work import Work

Agree = Callable[[Sequence[int], Sequence[int]], int]
"""How many drafts count as right, given what was sampled in their places and behind them."""


def agreeing(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """Verify drafts: how many of the first are what was sampled in their places, which is the truth."""
    right = 0
    while right < len(drafts) and sampled[right] == drafts[right]:
        right += 1
    return right


class Verifier(OneToken):
    """Lets a work with drafts yield several tokens.

    tokens: `[R, max_len]` int64, the rows of the engine.
    agree: which drafts are right; replacing it changes the text.
    """

    def __init__(self, tokens: Tensor, agree: Agree = agreeing) -> None:
        self.tokens, self.agree = tokens, agree

    def write(self, works: Sequence[Work]) -> None:
        """Write the drafts behind the newest tokens of their rows."""
        drafted = [work for work in works if work.drafts]
        if drafted:
            lens = [len(work.drafts) for work in drafted]
            ends = np.cumsum(lens)
            first = np.repeat([work.start + work.count for work in drafted] - ends, lens)
            columns = {
                "rows": np.repeat([work.row for work in drafted], lens),
                "positions": first + np.arange(ends[-1]),
                "tokens": np.concatenate([work.drafts for work in drafted]),
            }
            moved = upload(self.tokens.device, columns)
            self.tokens[moved["rows"], moved["positions"]] = moved["tokens"]

    def before(self, works: Sequence[Work]) -> Tensor | None:
        """`[S, K]` for `Sampler.sample`: the drafts before each sample; None if there are none at all."""
        if not any(work.drafts for work in works):
            return None
        lines = [
            work.drafts[:place]
            for work in works
            for _ in work.takers
            for place in range(len(work.drafts) + 1)
        ]
        before = np.full((len(lines), max(map(len, lines)) + 1), -1)  # the last column ends the longest
        for line, drafts in zip(before, lines, strict=True):
            line[: len(drafts)] = drafts
        return upload(self.tokens.device, {"before": before})["before"]

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        """Every draft that is right, and the token sampled after the last of these; else the one token."""
        if not any(work.drafts for work in works):
            return super().accepted(works, tokens)
        return list(self._accepted(works, iter(tokens)))

    def _accepted(self, works: Sequence[Work], tokens: Iterator[Token]) -> Iterator[list[Token]]:
        for work in works:
            for _ in work.takers:
                sampled = list(islice(tokens, len(work.drafts) + 1))
                right = self.agree([token for token, _ in sampled], work.drafts) if work.drafts else 0
                yield sampled[: right + 1]


def verify(engine: Engine) -> Verifier:
    """Make an engine verify drafts; returns what does."""
    found = engine.runner.extra
    if not isinstance(found, Verifier):
        engine.runner.extra = found = Verifier(engine.scheduler.rows.tokens)
    return found
