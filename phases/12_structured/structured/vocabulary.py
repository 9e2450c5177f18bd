"""The vocabulary that a grammar is matched against: the bytes of every token, and the end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model, as grammars see them.

    tokens: `[V]`, the bytes that each token adds in the middle of a text. Tokens that a grammar never
        allows have no bytes: special tokens, and ids that only pad the embedding.
    eos: ids of the tokens that end an output; a mask allows them where the output may end.
    """

    tokens: tuple[bytes, ...]
    eos: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> Vocabulary:
        """Return the vocabulary of a model with `size` logits, read from its tokenizer.

        eos: ids of the tokens that end an output.
        """
        hidden, bytes_of = {*tokenizer.special_ids, *eos}, tokenizer.token_bytes
        tokens = tuple(b"" if token in hidden else bytes_of[token] for token in range(size))
        return cls(tokens, tuple(token for token in eos if 0 <= token < size))
