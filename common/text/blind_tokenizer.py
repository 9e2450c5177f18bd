"""A model's tokenizer that does not see the special tokens in which a character has a stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers


class BlindTokenizer:
    """Encodes texts in which stand-ins keep special tokens from being seen as such.

    It differs from the model's tokenizer in one thing: it turns stand-ins back into characters after it has
    looked for special tokens. Everything behind that (words, merges, prefixes) is as if a special token with
    a stand-in had been an ordinary word. The two share their vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stand_in: Mapping[str, str]) -> None:
        """Copy the model's tokenizer `backend`. stand_in: characters, and what stands for each."""
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
        pairs = ((self._backend.token_to_id(token.content), index) for index, token in added)
        # Ids of added tokens that are others than the model's.
        self._renumbered = {
            ours: index for ours, index in pairs if ours is not None and ours != index
        }

    def encode(self, text: str) -> list[int]:
        """Return the model's token ids of a text; no special tokens are added."""
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return [self._renumbered.get(index, index) for index in found.ids]
