"""Prompt lookup: what followed the last tokens when they stood here before will follow them again.

Saxena, "Prompt Lookup Decoding", 2023. It guesses well where the output repeats the prompt: rewriting,
summarizing, code, questions about a document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from common.request import Request
from speculative.proposer import Proposer

NGRAM_SIZES = (4, 3, 2)
"""Lengths of the n-grams, the longest first: what more tokens agree on is right more often."""
MOST_TOKENS = 1 << 15
"""An index that has taken in as many tokens begins anew with the latter half."""
MOST_NEW = 4096
"""Tokens that an index takes in during one step: a prompt of 32,768 would delay the step of all by 40 ms."""


class NGramIndex:
    """Index of the position where each n-gram of a request's tokens occurred last.

    A token costs one entry for each of `NGRAM_SIZES`, some 130 bytes each, so an index has about 13 MB.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seen = 0  # tokens of the request that were taken in or dropped
        self._ends = dict[tuple[int, ...], int]()  # n-gram -> place of the token behind it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add those of a request's tokens that are not in the index yet. tokens: from its first on."""
        for token in tokens[self.seen :]:
            place = len(self.tokens)
            for size in NGRAM_SIZES:  # now that we know what followed
                if place >= size:
                    self._ends[tuple(self.tokens[place - size :])] = place
            self.tokens.append(token)
        self.seen = len(tokens)
        if len(self.tokens) >= MOST_TOKENS:
            kept = self.tokens[MOST_TOKENS // 2 :]
            self.tokens = []
            self._ends = {}
            self.seen = 0
            self.extend(kept)
            self.seen = len(tokens)

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that followed the request's last tokens where these stood earlier."""
        for size in NGRAM_SIZES:
            at = self._ends.get(tuple(self.tokens[-size:]))
            if at is not None:
                return follow(self.tokens, at, most)
        return []


def follow(tokens: Sequence[int], at: int, most: int) -> list[int]:
    """Return `most` tokens from index `at` on; past the end, the tokens from `at` on are repeated."""
    drafts = list(tokens[at : at + most])
    period = len(tokens) - at
    while len(drafts) < most:
        drafts.append(drafts[len(drafts) - period])
    return drafts


class NGrams(Proposer):
    """A proposer of drafts: the tokens that followed an earlier occurrence of a request's last n-gram."""

    rehearses = True

    def __init__(self) -> None:
        self.indexes = defaultdict[Request, NGramIndex](NGramIndex)

    def guess(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> list[list[int] | None]:
        """Return at most `lengths` drafts of each request; None until all of its prompt is in the index."""
        found = []
        for request, length in zip(requests, lengths, strict=True):
            index, tokens = self.indexes[request], request.tokens
            far = len(tokens) - index.seen > MOST_NEW  # else there is nothing to copy
            index.extend(tokens[: index.seen + MOST_NEW] if far else tokens)
            found.append(None if far else index.propose(length))
        return found

    def leave(self, request: Request) -> None:
        """Drop the index of a request that has ended or is preempted."""
        self.indexes.pop(request, None)
