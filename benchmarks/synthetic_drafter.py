"""Acceptance by decree, for models with random weights: the work is real, the text means nothing."""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from speculative.proposer import Proposer


class Synthetic(Proposer):
    """A proposer of arbitrary tokens, a given number of which count as accepted; for measurements.

    The output is not what the model would have said without drafts, so wherever a number comes from this,
    it is marked.

    Args:
        accept: drafts that count as accepted in a step, on average; never more than there are.
    """

    def __init__(self, accept: float) -> None:
        self.accept = accept
        self._owed = 0.0

    def agree(self, sampled: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many drafts count as accepted: a whole number; the fraction is carried over to the
        next call.
        """
        self._owed += self.accept
        right = min(int(self._owed), len(drafts))
        self._owed = min(self._owed - right, 1.0)
        return right

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Return as drafts the newest token of each request, repeated as often as `lengths` says."""
        return [[r.tokens[-1]] * length for r, length in zip(requests, lengths, strict=True)]
