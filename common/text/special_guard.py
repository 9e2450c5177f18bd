"""Keep special tokens that a user types in a chat message from becoming special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from common.text.blind_tokenizer import BlindTokenizer, StandIns


class SpecialGuard:
    """Encodes a conversation so that special tokens of the chat template count, and those in messages do not.

    Tokenizers look for special tokens in the whole rendered conversation, and cannot distinguish a
    template's from a user's. So one character of each special token in a message is replaced by a stand-in
    before the template is rendered; the template treats them like any other text. The rendered text
    is encoded by a `BlindTokenizer`, which looks for special tokens first and turns stand-ins back then.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Prepare stand-ins for the special tokens of the tokenizer `backend`."""
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self.stand_ins = StandIns([token.content for token in added if token.special])

    def hide(self, value: Any, *, whole: bool = False) -> Any:
        """Return `value` with one character of each special token in its texts replaced.

        value: a text, or lists and objects that hold texts. whole: only whole ones count, not halves of one.

        Raises:
            UserError: a text with a special token contains one of the stand-ins already.
        """
        if isinstance(value, str):
            harmless = self.stand_ins.of.keys().isdisjoint(value)
            return value if harmless else self.stand_ins.hide(value, whole)
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
        return BlindTokenizer(self._backend, self.stand_ins.of)
