"""Stop strings: watch a request's text as it grows, and give out only what will not be taken back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from common.sampling.params import SamplingParams
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer


class StopChecker:
    """Looks for a request's stop strings in its text, token by token; one for each completion.

    A stop string may be spread over several tokens. Text that may turn out to be the beginning of one is held
    back until it is decided. The string that is completed first counts, and of several completed by the same
    character the longest; so it does not matter how the text is cut into tokens. The text ends before it.

    The text of the first `min_tokens` tokens is not searched.

    A token costs time in proportion to its own text, however long the text before it and the stop strings
    are: all strings are searched at once by `StopStrings`.

    Attributes:
        held: what came after `text` and may be the beginning of a stop string.
        stopped: whether a stop string has been completed.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Begin with an empty text."""
        self.held, self.stopped = "", False
        self._known: list[str] = []
        self._taken = 0  # pieces of `_known` that `take` has given out
        self._detokenizer = Detokenizer(tokenizer)
        self._strings = StopStrings(params.stop) if params.stop else None
        self._state, self._exempt = 0, params.min_tokens

    @property
    def text(self) -> str:
        """What is known to belong to the completion; made anew each time, so ask at the end."""
        return "".join(self._known)

    def take(self) -> str:
        """What has become known since the last call."""
        new = "".join(self._known[self._taken :])
        self._taken = len(self._known)
        return new

    def push(self, token_id: int) -> bool:
        """Add a token of the output; returns `stopped`. After a stop nothing is added."""
        if self.stopped:
            return True
        piece = self._detokenizer.push(token_id)
        if self._exempt > 0:
            self._exempt -= 1
            self._known.append(piece)
        elif piece:
            self._search(piece)
        return self.stopped

    def finish(self) -> str:
        """End the text, whatever it may have been the beginning of; returns all of it."""
        self._known.append(self.held)
        self.held = ""
        return self.text

    def _search(self, piece: str) -> None:
        text = piece
        if self._strings is not None:
            text = self.held + piece
            self._state, end, size = self._strings.search(self._state, piece)
            if size:
                self._known.append(text[: len(self.held) + end - size])
                self.held, self.stopped = "", True
                return
            safe = len(text) - self._strings.depth[self._state]
            text, self.held = text[:safe], text[safe:]
        self._known.append(text)


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
            state = self._step(state, char)
            if self._size[state]:
                return state, end, self._size[state]
        return state, len(piece), 0

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
