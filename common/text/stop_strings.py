"""Many strings sought at once in a text that grows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class StopStrings:
    """All stop strings of a request as one automaton, which reads a text once, character by character.

    A state is the longest end of the text so far that a stop string begins with; 0 is the empty one. Where no
    stop string goes on with the next character, the state falls back to its own longest end that is a state
    (A. V. Aho, M. J. Corasick: Efficient string matching, 1975, https://doi.org/10.1145/360825.360855).

    States are made when a text first reaches them, so that long stop strings cost nothing until they begin to
    match: 64 strings of 1,024 characters would have some 65,000. The strings are sorted, and those that begin
    with a state's text are neighbours, so a state needs no more than where they stand.

    Attributes:
        depth: the length of each state's text.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Begin with the empty state alone."""
        self._strings = sorted(set(strings))
        self._firsts = {string[0] for string in self._strings}
        self._next: dict[tuple[int, str], int] = {}
        self.depth = [0]
        self._span = [
            (0, len(self._strings))
        ]  # of the sorted strings, those that begin with the state's text
        self._fallback = [0]
        self._size = [0]  # of the longest stop string that the state's text ends with, or 0

    def search(self, state: int, piece: str) -> tuple[int, int, int]:
        """Read `piece` after `state`: the new state, where in `piece` a stop string ends, its length or 0."""
        for end, char in enumerate(piece, 1):
            state, size = self.read(state, char)
            if size:
                return state, end, size
        return state, len(piece), 0

    def read(self, state: int, char: str) -> tuple[int, int]:
        """Read one character: the new state, and the length of the longest string that ends here, or 0."""
        state = self._step(state, char)
        return state, self._size[state]

    def sizes(self, state: int) -> list[int]:
        """The lengths of all ends of the text with which a string begins, the longest first."""
        found = []
        while state:
            found.append(self.depth[state])
            state = self._fallback[state]
        return found

    def _step(self, state: int, char: str) -> int:
        while (found := self._child(state, char)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return found

    def _child(self, state: int, char: str) -> int | None:
        """The state whose text is that of `state` and then `char`."""
        if state == 0 and char not in self._firsts:
            return None
        known = self._next.get((state, char))
        if known is not None:
            return known
        (low, high), size = self._span[state], self.depth[state] + 1
        # Of strings that are alike before it, the character at this place gives the order; '' is the lowest.
        low = bisect_left(self._strings, char, low, high, key=lambda string: string[size - 1 : size])
        high = bisect_right(self._strings, char, low, high, key=lambda string: string[size - 1 : size])
        if low == high:
            return None
        fallback = self._step(self._fallback[state], char) if state else 0
        ends_here = len(self._strings[low]) == size  # the shortest of the neighbours is the first
        made = self._next[state, char] = len(self.depth)
        self.depth.append(size)
        self._span.append((low, high))
        self._fallback.append(fallback)
        self._size.append(size if ends_here else self._size[fallback])
        return made
