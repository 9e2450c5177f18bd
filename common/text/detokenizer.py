"""Text from a growing sequence of tokens, in time that is linear in their number whatever they are."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "replace_each_byte"

# SentencePiece shows each invalid byte as U+FFFD; by UTF-8's own rule several that belong together are one.
codecs.register_error(
    _EACH_BYTE,
    lambda error: ("\ufffd" * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)


class TokenBytes(dict[int, bytes | None]):
    """The UTF-8 bytes that each token adds to a text, looked up once a token.

    An id outside the vocabulary adds none. None: what the token adds depends on its neighbours.

    A byte-level tokenizer (GPT-2's kind) spells bytes as characters. One with byte fallback (SentencePiece's
    kind) has a token for every byte, `<0x00>` to `<0xFF>`, beside its pieces of text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Look at the decoder of `backend`: it says which kind this is."""
        super().__init__()
        self._backend = backend
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if step]
        self.byte_level, self.byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self._each_alone = bool(steps) and set(steps) <= {"Replace", "ByteFallback", "Fuse"}

    def __missing__(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # not kept: there is no end of such ids
        self[token_id] = found = self._bytes(token_id, token)
        return found

    def _bytes(self, token_id: int, token: str) -> bytes | None:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # an added token that is written as it is
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode() if self._each_alone else None


class Detokenizer:
    """The text of a growing sequence of tokens, in pieces that can be shown at once.

    A character can be spread over several tokens (an emoji is four bytes), so its bytes are held back until
    it is complete. The pieces together are exactly `Tokenizer.decode` of all ids, but for a character that is
    still incomplete at the end: it is left out, because the model was cut off before it had said it. Bytes
    that can never become a character are shown as U+FFFD as soon as that is certain.

    No more than three bytes and one token are kept, and a token costs some microseconds at most: bytes go
    through an incremental UTF-8 decoder, and a token whose text depends on its neighbours (whether it begins
    the text, whether a space stands between two) is decoded beside the one before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """Begin an empty text. shown: special tokens that belong to it all the same."""
        self._backend, self._bytes = tokenizer.backend, tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        errors = _EACH_BYTE if self._bytes.byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._last: int | None = None

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now complete, often one word, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        data = self._bytes[token_id]
        if data is None:
            text = self.incomplete() + self._beside_last(token_id)
        elif not data:
            return ""
        else:
            text = self._utf8.decode(data)
            # SentencePiece's decoders strip a space that begins a text. (Bytes of a character may follow it.)
            if data == b" " and self._last is None:
                text = self._backend.decode([token_id], skip_special_tokens=False)
        self._last = token_id
        return text

    def incomplete(self) -> str:
        """What `Tokenizer.decode` shows for a character that is still incomplete; its bytes are dropped."""
        return self._utf8.decode(b"", final=True)

    def _beside_last(self, token_id: int) -> str:
        decode = self._backend.decode
        if self._last is None:
            return decode([token_id], skip_special_tokens=False)
        known = decode([self._last], skip_special_tokens=False)
        return decode([self._last, token_id], skip_special_tokens=False)[len(known) :]


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for.

    Printable bytes stand for themselves; the others follow from U+0100 on, in order
    (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    alphabet = ByteLevel.alphabet()
    printable = {char: ord(char) for char in alphabet if ord(char) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(sorted(set(alphabet) - set(printable)), others, strict=True))


_BYTE_OF = _byte_alphabet()
