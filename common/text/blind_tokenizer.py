"""Characters that hide special tokens in users' texts, and a tokenizer that turns them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

from common.errors import UserError

_STAND_INS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0x10FF00, 0x10FFFE))]
"""Characters that no text contains: Unicode reserves the first 32, and the others are private use."""


class StandIns:
    """Replaces a character of each special token in a text by a stand-in: the token is not seen as such.

    A message may also end with the first half of a special token where the next begins with the second half,
    so halves at the ends of a text are broken, too. In a role only whole special tokens are broken: templates
    such as `'<|' + role + '|>'` make special tokens of roles.

    special: texts of the special tokens. of: the stand-in for each character that begins or ends a special
        token.
    rewritten: True if the tokenizer's normalizer may make a special token out of a text in which nothing was
        replaced, because it contained none before.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = [one for one in backend.get_added_tokens_decoder().values() if one.special]
        self.special = special = [token.content for token in added]
        self.rewritten = backend.normalizer is not None and any(
            one.normalized for one in added
        )
        chars = sorted({token[place] for token in special for place in (0, -1)})
        self.of = dict(zip(chars, _STAND_INS, strict=False))
        self._longest = max(map(len, special), default=0)
        self._prefixes = {token[: at + 1] for token in special for at in range(len(token))}
        self._suffixes = {token[at:] for token in special for at in range(len(token))}

    def hide(self, text: str, whole: bool) -> str:
        """Return `text` with one character of each special token in it replaced by another, a stand-in.

        whole: True: halves of special tokens at the ends of the text may stay.

        Raises:
            UserError: a text with a special token contains one of the stand-ins already.
        """
        positions = self._positions_to_hide(text, whole)
        if not positions:
            return text
        for stand_in in self.of.values():
            if stand_in in text:
                code = f"U+{ord(stand_in):04X}"
                words = f"a message has a special token and {code}, which no text may have"
                raise UserError(words)
        return "".join(
            self.of[char] if place in positions else char for place, char in enumerate(text)
        )

    def _positions_to_hide(self, text: str, whole: bool) -> set[int]:
        """Return the indices of characters to replace: then no special token is left in `text`.

        whole: False: nor the half of one at either end of the text; True: such halves may stay.
        """
        positions = set()
        for token in self.special:
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


class BlindTokenizer:
    """Encodes texts in which stand-ins (characters in the place of others) hide special tokens.

    It differs from the model's tokenizer in one thing: it turns stand-ins back into characters after it has
    looked for special tokens. Everything behind that (words, merges, prefixes) is as if a special token with
    a stand-in had been an ordinary word. The two share their vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stand_in: Mapping[str, str]) -> None:
        """Copy the model's tokenizer `backend`. stand_in: by character, what stands for it in the texts."""
        self._backend = tokenizers.Tokenizer(backend.model)
        back: list[Any] = [
            normalizers.Replace(there, char) for char, there in stand_in.items()
        ]
        if backend.normalizer is not None:
            back.append(backend.normalizer)
        self._backend.normalizer = normalizers.Sequence(back)
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())
        # They are sought before the text is normalized, so before stand-ins are turned back.
        states = [token.__getstate__() for _, token in added if token.special]
        self._backend.add_special_tokens(
            [AddedToken(**{**state, "normalized": False}) for state in states]
        )
        self._backend.add_tokens([token for _, token in added if not token.special])
        self._special = {index for index, token in added if token.special}
        pairs = ((self._backend.token_to_id(token.content), index) for index, token in added)
        # Ids of added tokens that are others than the model's.
        self._renumbered = {
            ours: index for ours, index in pairs if ours is not None and ours != index
        }

    def encode(self, text: str) -> list[int]:
        """Return the model's token ids of a text; no special tokens are added."""
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return [self._renumbered.get(index, index) for index in found.ids]

    def checked(self, text: str, ids: list[int]) -> list[int]:
        """Return `ids`, or `encode(text)` if that has fewer special tokens.

        ids: what the model's own tokenizer makes of `text`; its normalizer can make special tokens.
        """
        own = self.encode(text)
        mine, found = (sum(index in self._special for index in some) for some in (own, ids))
        return ids if found <= mine else own
