"""What goes to the engine for one prompt, and what its answer needs to know of it."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from common.sampling.params import SamplingParams
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
    """Where tokens begin in the text that they make, of which they may be parts of characters."""

    def __init__(self) -> None:
        self._next = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> int:
        """Where the token of these bytes begins; one that goes on with a character, where that does."""
        broken = self._decoder.getstate()[0] and data and data[0] & 0xC0 != 0x80
        begin = self._next + bool(broken)  # behind the sign that stands for a character without an end
        self._next += len(self._decoder.decode(data))
        return begin
