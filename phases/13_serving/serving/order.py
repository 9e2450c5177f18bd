"""What goes to the engine for one prompt, and what its answer needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from serving.messages import Read, Token
from serving.tools.formats import CallFormat


@dataclass
class Order:
    """A prompt as it goes to the engine.

    text: what `echo` repeats; empty unless asked for.
    asked: the field that constrains the output, if one does.
    calls: how the model writes calls, if it may make any.
    read: the log-probabilities of the prompt's tokens, from the first completion's first token on.
    loosened: keywords that the output need not follow.
    """

    prompt: list[int]
    params: SamplingParams
    text: str = ""
    asked: str = ""
    calls: CallFormat | None = None
    read: list[Read | None] = field(default_factory=list)
    loosened: list[str] = field(default_factory=list)


@dataclass
class Piece:
    """What one token added, or several, ready to be sent.

    marks: if asked for, the text of each token and how it came about.
    """

    text: str
    tokens: list[int]
    logprobs: list[Token] = field(default_factory=list)
    marks: list[tuple[str, str]] = field(default_factory=list)


class Offsets:
    """Spells tokens as the text has them, and tells where each begins there.

    A token may be a part of a character. A special token takes no room, unless the text has it.
    """

    def __init__(self, tokenizer: Tokenizer, text: str = "", *, start: int = 0, begins: bool = False) -> None:
        """Begin with the first token of a prompt or of an output.

        text: the prompt's; empty for an output.
        start, begins: of an output, its place in the text that is returned, and `Detokenizer.begins`.
        """
        self._bytes, self._special = tokenizer.token_bytes, tokenizer.special_ids
        self._text, self._next, self._begins = text, start, begins
        self._decoder = self._bytes.decoder()

    def spelled(self, token: int) -> bytes:
        """The bytes of a token, if it comes next."""
        data = self._bytes[token]
        if self._text:
            bare = data.removeprefix(b" ")  # some tokenizers set a space where the text has none
            return bare if self._comes(bare) and not self._comes(data) else data
        return self._bytes.first(token) if self._begins and token not in self._special else data

    def take(self, token: int) -> int:
        """Where the next token begins; one that goes on with a character, where that does."""
        data = self.spelled(token)
        if token in self._special and not self._comes(data):
            return self._next
        self._begins &= not self._bytes[token]
        if data and data[0] & 0xC0 != 0x80:  # what is left of a character will have no end
            self._next += len(self._decoder.decode(b"", final=True))
        begin = self._next
        self._next += len(self._decoder.decode(data))
        return begin

    def _comes(self, data: bytes) -> bool:
        return self._text.startswith(data.decode("utf-8", "replace"), self._next)
