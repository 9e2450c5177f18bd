"""Text from a growing sequence of tokens, in time that is linear in their number whatever they are."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "replace_each_byte"
_ALIKE = {"Replace", "ByteFallback", "Fuse"}
"""Steps of decoders that do to a token in the middle of a text what they do to the first."""
_LARGEST_ID = 2**32 - 1
MOST_TOKENS_OF_A_CHARACTER = 4

# SentencePiece shows each invalid byte as U+FFFD; by UTF-8's own rule several that belong together are one.
codecs.register_error(
    _EACH_BYTE,
    lambda error: ("\ufffd" * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)


class TokenBytes(dict[int, bytes]):
    """The UTF-8 bytes that each token adds in the middle of a text, looked up once a token.

    An id outside the vocabulary adds none. A byte-level tokenizer (GPT-2's kind) spells bytes as characters.
    One with byte fallback (SentencePiece's kind) has a token for every byte, `<0x00>` to `<0xFF>`, beside its
    pieces of text.

    Of a decoder that looks at neighbours these are the bytes behind the same token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Look at the decoder of `backend`: it says which kind this is."""
        super().__init__()
        self._backend = backend
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        parts = [part for part in decoder.get("decoders", [decoder]) if part]
        steps = [part["type"] for part in parts]
        self.byte_level, self.byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self._alike = bool(steps) and set(steps) <= _ALIKE

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id <= _LARGEST_ID else None
        if token is None:
            return b""  # not kept: there is no end of such ids
        self[token_id] = found = self._bytes(token_id, token)
        return found

    def first(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text which begins with it: some decoders drop its space there."""
        found = self[token_id]
        return (
            found if self.byte_level or b" " not in found else self._decode(token_id).encode()
        )

    def decoder(self) -> codecs.IncrementalDecoder:
        """A decoder of their bytes, which shows those that are no character as U+FFFD."""
        return codecs.getincrementaldecoder("utf-8")(
            _EACH_BYTE if self.byte_fallback else "replace"
        )

    def _bytes(self, token_id: int, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # an added token that is written as it is
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        begins = self._decode(token_id)
        return (
            begins if self._alike else self._decode(token_id, token_id)[len(begins) :]
        ).encode()

    def _decode(self, *ids: int) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


class Detokenizer:
    """The text of a growing sequence of tokens, in pieces that can be shown at once.

    A character can be spread over several tokens (an emoji is four bytes), so its bytes are held back until
    it is complete. The pieces together are exactly `Tokenizer.decode` of all ids, but for a character that is
    still incomplete at the end: it is left out, because the model was cut off before it had said it. Bytes
    that can never become a character are shown as U+FFFD as soon as that is certain.

    A completion goes on from its prompt: its text is that of both, less the prompt's. Decoded alone it would
    lose the space that some decoders drop where a text begins. A prompt of special tokens alone has no text,
    so the completion begins one.

    No more than three bytes are kept, and a token costs some microseconds at most: bytes go through an
    incremental UTF-8 decoder.

    Attributes:
        begins: whether the next token that can be seen begins the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
        middle: bool = False,
    ) -> None:
        """Begin an empty text, or go on from a prompt.

        shown: special tokens that belong to the text all the same.
        after: the prompt's tokens.
        middle: go on from a prompt even if it has no text.
        """
        self._bytes = tokenizer.token_bytes
        self._skipped = (
            tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        )
        self._utf8 = self._bytes.decoder()
        self.begins = not middle
        visible = (
            token
            for token in map(int, reversed(after))
            if token not in self._skipped and self._bytes[token]
        )
        for token in reversed([*islice(visible, MOST_TOKENS_OF_A_CHARACTER)]):
            self.push(token)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now complete, often one word, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        data = self._bytes[token_id]
        if not data:
            return ""
        if self.begins:
            data, self.begins = self._bytes.first(token_id), False
        return self._utf8.decode(data)

    def incomplete(self) -> str:
        """The text that `Tokenizer.decode` shows for an incomplete character, whose bytes are dropped."""
        return self._utf8.decode(b"", final=True)


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
