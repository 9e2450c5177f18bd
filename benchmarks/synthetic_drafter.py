"""Acceptance by decree, for models with random weights: the work is real, the text means nothing."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from speculative.speculation import Proposer


class Synthetic(Proposer):
    """A `Proposer` of arbitrary tokens, of which so many count as right.

    The output is not what the model would have said without drafts, so wherever a number comes from this, it
    is marked.

    Args:
        accept: drafts that count as right in a step, on average; never more than there are.
    """

    def __init__(self, accept: float) -> None:
        self.accept = accept
        self._owed = 0.0

    def agree(self, sampled: Sequence[int], drafts: Sequence[int]) -> int:
        """Accept a whole number of drafts, and carry the fraction over to the next call."""
        self._owed += self.accept
        right = min(int(self._owed), len(drafts))
        self._owed = min(self._owed - right, 1.0)
        return right

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """The newest token, again and again."""
        return [[r.tokens[-1]] * length for r, length in zip(requests, lengths, strict=True)]
