"""A suffix automaton: the longest end of the text that stood somewhere before, however long it is.

The n-gram index looks a few tokens back. Here the whole past is compared, in constant time a token, and the
past of other requests as well. Blumer et al., "The smallest automaton recognizing the subwords of a text",
1985; for drafting: Oliaro et al., "SuffixDecoding", NeurIPS 2025 (arXiv 2411.04975), with suffix trees.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.request import Request
from speculative.ngram import follow
from speculative.speculation import Source

BYTES_PER_TOKEN = 900
"""At most two states a token, each with a dictionary of one entry or two and four numbers; measured."""
SHORTEST = 2
"""Ends shorter than this say too little."""
LONGEST = 32
"""How far back the shared text is compared."""
MOST_TOKENS = 1 << 14
"""Of one request; an automaton that has taken in as many begins anew with the latter half."""
BREAK = -1
"""Stands between two texts: it is no token, so no match runs across it."""


class SuffixAutomaton:
    """All substrings of a text, as a graph with at most two states a token.

    A state stands for the substrings that end at the same places. Its `link` is the state of the longest of
    their ends that also stands elsewhere; `length` is its longest substring's; `end` is a place behind it.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [0]
        self.last = 0  # the state of the whole text
        self._answer = (-1, 0, 0)

    def add(self, token: int) -> None:
        """Append a token: amortized constant time."""
        if token == BREAK:
            self.tokens.append(token)
            self.last = 0
            return
        self.tokens.append(token)
        known = self.next[self.last].get(token)
        if known is not None:  # it goes on like a text that is here already
            self.last = self._split(self.last, token, known)
            return
        new = self._state({}, self.length[self.last] + 1, len(self.tokens))
        state, self.last = self.last, new
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token, self.next[state][token])

    def _split(self, state: int, token: int, target: int) -> int:
        """The state of exactly what `state` and `token` make, which may have to be cut off from `target`."""
        if self.length[target] == self.length[state] + 1:
            return target
        copy = self._state(dict(self.next[target]), self.length[state] + 1, self.end[target])
        self.link[copy], self.link[target] = self.link[target], copy
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that stood here before: its length, and the place behind it."""
        if self._answer[0] != len(self.tokens):
            state = self.link[self.last] if self.last else 0
            self._answer = len(self.tokens), max(0, self.length[max(0, state)]), self.end[max(0, state)]
            if state > 0:
                self.end[state] = len(self.tokens)  # when we are asked again, it stood here last
        return self._answer[1:]

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest end of `tokens` that stands here: its length, and a place behind it."""
        state = length = 0
        for token in tokens:
            while state and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            state = self.next[state].get(token, 0)
            length = length + 1 if state else 0
        return length, self.end[state]


class Suffixes(Source):
    """A `Source`: of what the request said itself and what others said before it, the longer match.

    Requests that have ended leave their text to a shared automaton, one for each salt, since what one tenant
    wrote must not speed up the guesses of another. All shared ones together take `most_bytes`, and half of
    it is forgotten when it is used up; an own one takes at most `MOST_TOKENS * BYTES_PER_TOKEN`.
    """

    def __init__(self, most_bytes: int) -> None:
        self.limit(most_bytes)
        self.own: dict[Request, tuple[SuffixAutomaton, int]] = {}
        self.young: dict[str, SuffixAutomaton] = {}
        self.old: dict[str, SuffixAutomaton] = {}
        self._young_tokens = 0

    def limit(self, most_bytes: int) -> None:
        """Let the shared automata take so many bytes."""
        self.most_tokens = most_bytes // BYTES_PER_TOKEN // 2

    @property
    def shared_bytes(self) -> int:
        """An estimate from above of what the shared automata take."""
        shared = (*self.young.values(), *self.old.values())
        return BYTES_PER_TOKEN * sum(len(automaton.tokens) for automaton in shared)

    def forget(self) -> None:
        """Drop what is shared."""
        self.young, self.old, self._young_tokens = {}, {}, 0

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """See `Source`."""
        return [self._one(*pair) for pair in zip(requests, lengths, strict=True)]

    def _one(self, request: Request, most: int) -> list[int]:
        own, seen = self.own.get(request) or (SuffixAutomaton(), 0)
        for token in request.tokens[seen:]:
            own.add(token)
        if len(own.tokens) >= MOST_TOKENS:
            kept, own = own.tokens[MOST_TOKENS // 2 :], SuffixAutomaton()
            for token in kept:
                own.add(token)
        self.own[request] = own, len(request.tokens)
        length, end = own.repeated()
        tokens, longest = own.tokens, length
        for shared in (self.young.get(request.salt), self.old.get(request.salt)):
            if shared is not None:
                matched, place = shared.match(request.tokens[-LONGEST:])
                if matched > longest:
                    tokens, longest, end = shared.tokens, matched, place
        if longest < SHORTEST:
            return []
        drafts = follow(tokens, end, most)
        return drafts[: drafts.index(BREAK)] if BREAK in drafts else drafts

    def leave(self, request: Request) -> None:
        """A request that has ended leaves its text to the others."""
        if self.own.pop(request, None) is None or request.finish_reason is None or self.most_tokens < 2:
            return
        tokens = [*request.tokens[1 - self.most_tokens :], BREAK]
        if self._young_tokens + len(tokens) > self.most_tokens:
            self.old, self.young, self._young_tokens = self.young, {}, 0
        automaton = self.young.setdefault(request.salt, SuffixAutomaton())
        for token in tokens:
            automaton.add(token)
        self._young_tokens += len(tokens)
