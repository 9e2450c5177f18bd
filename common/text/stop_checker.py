"""Stop strings: watch a request's text as it grows, and give out only what will not be taken back."""

from __future__ import annotations

from common.sampling.params import SamplingParams
from common.text.tokenizer import Detokenizer, Tokenizer


class StopChecker:
    """Looks for a request's stop strings in its text, token by token; one for each completion.

    A stop string may be spread over several tokens. Text that may turn out to be the beginning of one is held
    back until it is decided. The string that is completed first counts, and of several completed by the same
    character the longest; so it does not matter how the text is cut into tokens. The text ends before it.

    The text of the first `min_tokens` tokens is not searched.

    Attributes:
        text: what is known to belong to the completion.
        held: what came after it and may be the beginning of a stop string.
        stopped: whether a stop string has been completed.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Begin with an empty text."""
        self.text, self.held, self.stopped = "", "", False
        self._detokenizer = Detokenizer(tokenizer)
        self._stop, self._exempt = params.stop, params.min_tokens

    def push(self, token_id: int) -> bool:
        """Add a token of the output; returns `stopped`. After a stop nothing is added."""
        if self.stopped:
            return True
        piece = self._detokenizer.push(token_id)
        if self._exempt > 0:
            self._exempt -= 1
            self.text += piece
        else:
            self._add(piece)
        return self.stopped

    def finish(self) -> str:
        """End the text, whatever it may have been the beginning of; returns all of it."""
        if not self.stopped:
            self._add(self._detokenizer.flush())
            self.text, self.held = self.text + self.held, ""
        return self.text

    def _add(self, piece: str) -> None:
        held = self.held + piece
        ends = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if ends:
            _, start = min(ends)
            self.text, self.held, self.stopped = self.text + held[:start], "", True
            return
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        safe = len(held) - keep
        self.text, self.held = self.text + held[:safe], held[safe:]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
