"""Stop strings: watch a request's text as it grows, and give out only what will not be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from common.sampling.params import SamplingParams
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer


class StopChecker:
    """Looks for a request's stop strings in its text, token by token; one for each completion.

    A stop string may be spread over several tokens. Text that may turn out to be the beginning of one is held
    back until it is decided. The string that is completed first counts, and of several completed by the same
    character the longest; so it does not matter how the text is cut into tokens. The text ends before it.

    The text of the first `min_tokens` tokens is not searched.

    A token costs time in proportion to its own text and to what is held back, not to the text before.

    Attributes:
        held: what came after `text` and may be the beginning of a stop string.
        stopped: whether a stop string has been completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Begin the text that goes on from a prompt; `shown` is `Detokenizer`'s."""
        self.held, self.stopped = "", False
        self._known: list[str] = []
        self._taken = 0  # pieces of `_known` that `take` has given out
        # A grammar counts the bytes that tokens have in the middle of a text.
        self._detokenizer = Detokenizer(
            tokenizer, shown=shown, after=prompt, middle=params.grammar is not None
        )
        self._stops, self._exempt = params.stop, params.min_tokens

    @property
    def begins(self) -> bool:
        """Return True if the next token begins a text: see `Detokenizer`."""
        return self._detokenizer.begins

    @property
    def text(self) -> str:
        """The text known to belong to the completion; made anew each time, so ask at the end."""
        return "".join(self._known)

    def take(self) -> str:
        """Return the text that has become known since the last call."""
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
        text = self.held + piece
        found = [(at + len(stop), -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, size = min(found)
            self._known.append(text[: end + size])
            self.held, self.stopped = "", True
            return
        begins = (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in self._stops))
        safe = next(begins, len(text)) if self._stops else len(text)
        self._known.append(text[:safe])
        self.held = text[safe:]
