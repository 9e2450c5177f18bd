"""The part of a tokenizer that a grammar library needs: names of special tokens, and an encoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

import tokenizers

from common.text.tokenizer import Tokenizer
from structured.vocabulary import Vocabulary

LONGEST_KEPT, MOST_KEPT = 256, 4096
"""Characters of a text whose tokens are remembered, and how many such texts are."""


@dataclass(frozen=True, eq=False)
class Spelling(Vocabulary):
    """The tokens of a model, and how they spell a text.

    encode: returns ids of tokens whose bytes are exactly a given text's.
    special: names, by id, of the tokens without bytes, by which a Lark grammar may ask for them.
    added: ids, by name, of tokens with bytes that stand in the tokenizer's list of added tokens.
    """

    encode: Callable[[str], Sequence[int]]
    special: Mapping[int, str] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> Self:
        """Return the vocabulary of a model's tokenizer. size: number of the model's logits.

        eos: ids of the tokens that end an output.
        """
        plain = Vocabulary.of(tokenizer, size, eos)
        names = {
            token: name
            for token in {*tokenizer.special_ids, *plain.eos}
            if token < size and (name := tokenizer.backend.id_to_token(token))
        }
        decoder = tokenizer.backend.get_added_tokens_decoder()
        added = {
            one.content: token
            for token, one in decoder.items()
            if token < size and token not in names
        }
        return cls(
            plain.tokens,
            plain.eos,
            Encoder(tokenizer.backend, plain.tokens, added),
            names,
            added,
        )


class Encoder:
    """Turns a text that stands in the middle of another into tokens whose bytes are exactly that text.

    A tokenizer may put a space before a text, compose or lower its letters, and take names for special
    tokens. The model has seen the tokenizer's own tokens, so these are used where they keep the bytes: of the
    text alone, or after a line break. Elsewhere the text is split at names of added tokens and each part is
    encoded by itself; where that does not help, the longest token that fits comes next.

    Results for short texts are cached: outputs of one grammar ask for the same texts again and again.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, tokens: Sequence[bytes], added: Mapping[str, int]
    ) -> None:
        self._backend, self._tokens = backend, tokens
        names = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        self._names = re.compile(f"({names})" if added else "(?!)")
        self._ids = {data: token for token, data in enumerate(tokens) if data}
        self._longest = max(map(len, self._ids), default=0)
        self._short = lru_cache(MOST_KEPT)(self._encode)

    def __call__(self, text: str) -> list[int]:
        """Return token ids of a text; if some character has no token, only of the text before it."""
        return self._short(text) if len(text) <= LONGEST_KEPT else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        data = text.encode()
        for before in ("", "\n"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            # What stands before the text is two tokens at most.
            for start in range(min(3, len(ids))):
                pieces = [
                    self._tokens[token] if token < len(self._tokens) else b""
                    for token in ids[start:]
                ]
                if all(pieces) and b"".join(pieces) == data:
                    return ids[start:]
        parts = [part for part in self._names.split(text) if part]
        if len(parts) > 1:
            return [token for part in parts for token in self(part)]
        return list(self._longest_first(data))

    def _longest_first(self, data: bytes) -> Iterator[int]:
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                return
            yield self._ids[data[:size]]
            data = data[size:]
