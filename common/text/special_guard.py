"""Keep special tokens that a user types in a chat message from becoming special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from common.errors import UserError
from common.text.blind_tokenizer import BlindTokenizer

_STAND_INS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0x10FF00, 0x10FFFE))]
"""Characters that no text contains: Unicode reserves the first 32, and the others are unassigned."""


class SpecialGuard:
    """Encodes a conversation so that special tokens of the chat template count, and those in messages do not.

    Tokenizers look for special tokens in the whole rendered conversation, and cannot distinguish a
    template's from a user's. So one character of each special token in a message is replaced by a stand-in
    before the template is rendered; the template treats them like any other text. The rendered text
    is encoded by a `BlindTokenizer`, which looks for special tokens first and turns stand-ins back then.

    A message may also end with the first half of a special token where the next begins with the second
    half, so halves at the ends of a text are broken, too. In a role only whole ones are: templates such as
    `'<|' + role + '|>'` make special tokens of roles.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Prepare stand-ins for the special tokens of the tokenizer `backend`."""
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]
        chars = sorted({token[place] for token in self._special for place in (0, -1)})
        self._stand_in = dict(zip(chars, _STAND_INS, strict=False))
        self._longest = max(map(len, self._special), default=0)
        self._prefixes = {
            token[: at + 1] for token in self._special for at in range(len(token))
        }
        self._suffixes = {token[at:] for token in self._special for at in range(len(token))}

    def hide(self, value: Any, *, whole: bool = False) -> Any:
        """Return `value` with one character of each special token in its texts replaced.

        The tokenizer then does not see it as one. The same object if there is none.

        Args:
            value: a text, or lists and objects that hold texts.
            whole: leave halves of special tokens as they are.

        Raises:
            UserError: a text with a special token contains one of the stand-ins already.
        """
        if isinstance(value, str):
            return self._hide(value, whole)
        if isinstance(value, Mapping):
            return {
                self.hide(key, whole=True): self.hide(item, whole=whole or key == "role")
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(self.hide(item, whole=whole) for item in value)
        return value

    def encode(self, text: str, hidden: bool) -> list[int]:
        """Return the token ids of a rendered conversation. hidden: `hide` has changed a text in it."""
        if hidden:
            return self._blind.encode(text)
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    @cached_property
    def _blind(self) -> BlindTokenizer:
        return BlindTokenizer(self._backend, self._stand_in)

    def _hide(self, text: str, whole: bool) -> str:
        if self._stand_in.keys().isdisjoint(text):
            return text
        positions = self._positions_to_hide(text, whole)
        if not positions:
            return text
        for stand_in in self._stand_in.values():
            if stand_in in text:
                code = f"U+{ord(stand_in):04X}"
                words = f"a message has a special token and {code}, which no text may have"
                raise UserError(words)
        return "".join(
            self._stand_in[char] if place in positions else char
            for place, char in enumerate(text)
        )

    def _positions_to_hide(self, text: str, whole: bool) -> set[int]:
        """Return which characters to replace so that no special token, nor half of one, is left in a text.

        whole: halves may stay.
        """
        positions = set()
        for token in self._special:
            at = text.find(token)
            while at >= 0:
                positions.add(at + len(token) - 1)
                at = text.find(token, at + 1)
        if not whole:
            last, first = len(text.rstrip()), len(text) - len(text.lstrip())
            for size in range(1, self._longest + 1):
                if size <= last and text[last - size : last] in self._prefixes:
                    positions.add(last - size)
                if text[first : first + size] in self._suffixes:
                    positions.add(first + size - 1)
        return positions
