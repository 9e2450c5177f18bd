"""The places of tokens in the text that is returned."""

from __future__ import annotations

from common.text.tokenizer import Tokenizer


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
        """Return the place of the next token; one that goes on with a character is where that begins."""
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
