"""Decode the tokens of a completion to text as they come, up to a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.text.detokenizer import Detokenizer
from common.text.marks import decided_length

if TYPE_CHECKING:
    from common.events import FinishReason
    from common.sampling.params import SamplingParams
    from common.text.tokenizer import Tokenizer


class TextStream:
    """The text of one completion in pieces that can be shown as soon as they are returned.

    The end-of-sequence or stop token that ended it is left out; so is a stop string with what follows.

    A stop string may be spread over several tokens. Text that may turn out to be the beginning of one is
    held back until it is decided. The string that is completed first counts, and of several completed by
    the same character the longest; so it does not matter how the text is split into tokens. The text of the
    first `min_tokens` tokens is not searched. A token costs time in proportion to its own text and to what
    is held back, not to the text before.

    beginning: tokens so far before which no text stands, so that some decoders drop a leading space.
    sizes: characters of each token's own text, wherever it is shown.
    stop: the stop string that has ended it; None: there was none.
    """

    stop: str | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
        answer: Callable[[str, bool], str] | None = None,
        mark: str = "",
    ) -> None:
        """Start with an empty text that continues `prompt` (token ids).

        params: its `stop`, `min_tokens` and `grammar` are used. shown: special tokens that stay in the text.
        answer: called with the text each token adds, and True if nothing follows; returns the part that is
            shown and searched for stop strings. Reasoning, say, is neither. None: all is shown.
        mark: text from which on no stop string is looked for, such as the beginning of a tool call, of whose
            text a client sees but a part; empty: there is none. `^{`: a brace that begins the text.
        """
        # A grammar counts the bytes that tokens have in the middle of a text.
        self._detokenizer = Detokenizer(tokenizer, shown, prompt, params.grammar is not None)
        self.beginning = 0
        self._stops, self._exempt = sorted(params.stop), params.min_tokens
        self._mark = mark if params.stop else ""
        self._held = self._begun = ""  # what may become a stop string, and the mark
        self.sizes: list[int] = []
        self._answer = answer

    def advance(
        self, token_id: int | None, reason: FinishReason | None
    ) -> tuple[FinishReason | None, str]:
        """Append the next token (None: there is none) with the reason why it is the last (None: it is not).

        Returns:
            The reason, which is "stop" if the token completes a stop string, and the text that is added.
        """
        piece = ""
        if token_id is not None:
            self.beginning += self._detokenizer.begins
            piece = "" if reason == "stop" else self._detokenizer.push(token_id)
            self.sizes.append(len(piece))
        if self._answer is not None:
            piece = self._answer(piece, reason is not None)
        piece, called = self._split(piece, reason is not None) if self._mark else (piece, "")
        new = self._search(piece)
        if self.stop is not None:
            reason, called = "stop", ""
        elif called:
            self._stops, self._mark = [], ""
        if reason is not None or called:
            new, self._held = new + self._held + called, ""
        return reason, new

    def _split(self, piece: str, last: bool) -> tuple[str, str]:
        """Append decoded text; return it up to the mark, and from there on. last: nothing follows."""
        text, mark = self._begun + piece, self._mark.removeprefix("^")
        at = text.find(mark)
        if mark != self._mark and text and at:
            self._mark = ""  # the text begins with something else
        elif at >= 0:
            return text[:at], text[at:]
        at = len(text) if last else decided_length(text, mark)
        self._begun = text[at:]
        return text[:at], ""

    def _search(self, piece: str) -> str:
        """Append decoded text, and set `stop` once a stop string is complete; return what can be shown."""
        self._exempt -= 1
        if self._exempt >= 0 or not self._stops:
            return piece
        text = self._held + piece
        starts = ((text.find(stop), len(stop)) for stop in self._stops)
        found = [(at + length, -length) for at, length in starts if at >= 0]
        if found:
            end, size = min(found)
            self._held, self.stop = "", text[end + size : end]
            return text[: end + size]
        # If one of the sorted strings begins with a text, so does the first that does not stand before it.
        held, stops = text, [*self._stops, ""]
        while not stops[bisect_left(self._stops, held)].startswith(held):
            held = held[1:]  # at the latest nothing is left
        self._held = held
        return text[: len(text) - len(held)]
