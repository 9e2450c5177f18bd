"""Decode a growing sequence of tokens to text, in time linear in the number of tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from common.errors import UserError

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "replace_each_byte"
_ALONE = {"ByteLevel", "BPEDecoder", "CTC", "Sequence"}
"""Steps of decoders that other steps, but `Fuse` behind them, would make unlike those that are read here."""
_CONTEXT_FREE = {"Replace", "ByteFallback", "Fuse"}
"""Steps of decoders that treat a token in the middle of a text as they treat the first."""
_LARGEST_ID = 2**32 - 1
LOOKED_AT = 16
"""Tokens at the end of a prompt in which the text is sought that a completion goes on from."""

_PRINTABLE = {char: ord(char) for char in ByteLevel.alphabet() if ord(char) < 256}
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE.values()))
_BYTE_OF = _PRINTABLE | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Characters of byte-level BPE, and the byte that each stands for: those that cannot be printed have others
(https://github.com/openai/gpt-2/blob/master/src/encoder.py).
"""

# SentencePiece shows each invalid byte as U+FFFD; by UTF-8's own rule several that belong together are one.
codecs.register_error(
    _EACH_BYTE,
    lambda error: ("\ufffd" * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)


class TokenBytes(dict[int, bytes]):
    """Map from token id to the UTF-8 bytes that the token adds in the middle of a text, filled when read.

    An id outside the vocabulary adds none. A byte-level tokenizer (GPT-2's kind) spells bytes as
    characters. One with byte fallback (SentencePiece's kind) has a token for every byte, `<0x00>` to
    `<0xFF>`, beside its pieces of text. If the decoder looks at neighbours, the bytes are those that the
    token adds after another token.

    Attributes:
        suffix: what ends a word's last token, where a space follows unless the text ends; else empty.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read from the decoder of `backend` whether the tokenizer is byte-level or has byte fallback.

        Raises:
            UserError: the decoder looks at more than a token and the one before it.
        """
        super().__init__()
        self._backend = backend
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        parts = [part for part in decoder.get("decoders", [decoder]) if part]
        steps = [part["type"] for part in parts]
        if len(steps) > 1 and steps[-1] == "Fuse" and steps[0] in _ALONE:
            steps.pop()
        if (
            "CTC" in steps
            or (len(steps) > 1 and _ALONE & {*steps})
            or any(part.get("stop") for part in parts)
        ):
            raise UserError(
                f"tokenizer.json has a decoder of the steps {', '.join(steps)}, which together are "
                "not supported: a stream cannot show what they do"
            )
        self.byte_level, self.byte_fallback = steps == ["ByteLevel"], "ByteFallback" in steps
        self.suffix: str = parts[0]["suffix"] if steps == ["BPEDecoder"] else ""
        self._context_free = bool(steps) and set(steps) <= _CONTEXT_FREE

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id <= _LARGEST_ID else None
        if token is None:
            return b""  # not kept: there is no end of such ids
        if self.byte_level and _BYTE_OF.keys() >= set(token):
            found = bytes(map(_BYTE_OF.__getitem__, token))
        elif self.byte_level:  # an added token that is written as it is
            found = token.encode()
        elif self.suffix:
            found = token.replace(self.suffix, " ").encode()
        elif self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            found = bytes.fromhex(byte[1])
        else:
            begins = self._decode(token_id)
            if not self._context_free:
                begins = self._decode(token_id, token_id)[len(begins) :]
            found = begins.encode()
        self[token_id] = found
        return found

    def first(self, token_id: int) -> bytes:
        """Return the bytes that a token adds at the beginning of a text, where some decoders drop its space,
        or show the mark of a word's later part.
        """
        found = self[token_id]
        same = self.byte_level or self.suffix or (self.byte_fallback and b" " not in found)
        return found if same else self._decode(token_id).encode()

    def _decode(self, *ids: int) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


class Detokenizer:
    """Decodes the tokens of one output as they come, in pieces that can be shown at once.

    A character can be spread over several tokens (an emoji is four bytes), so its bytes are held back until
    it is complete. The pieces together are exactly `Tokenizer.decode` of all ids, except for a character that
    is still incomplete at the end: it is left out, because the model was cut off before it had said it. Bytes
    that can never become a character are shown as U+FFFD as soon as that is certain.

    The tokens are decoded as the continuation of their prompt, since some decoders drop a space where a text
    begins. A prompt of special tokens alone has no text, so the completion begins one.

    At most three bytes are held back, and a token costs some microseconds at most.

    begins: True if the next visible token begins the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
        middle: bool = False,
    ) -> None:
        """Start an empty text, or continue a prompt of the tokens `after`.

        shown: ids of special tokens that belong to the text; others are left out.
        middle: continue the prompt even if it has no text, so that a first space is kept.
        """
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids - shown
        errors = _EACH_BYTE if self._bytes.byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._space = b""  # behind a word: shown with the next token
        self.begins = not middle
        for token in map(int, after[-LOOKED_AT:]):
            self.push(token)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now complete, often one word, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        data = self._bytes[token_id]
        if not data:
            return ""
        if self.begins:
            data, self.begins = self._bytes.first(token_id), False
        if self._bytes.suffix:
            data = self._space + data
            self._space = data[len(data.removesuffix(b" ")) :]
            data = data.removesuffix(b" ")
        return self._utf8.decode(data)

    def incomplete(self) -> str:
        """Drop the bytes of an incomplete character; return what `Tokenizer.decode` shows for it."""
        return self._utf8.decode(b"", final=True)
