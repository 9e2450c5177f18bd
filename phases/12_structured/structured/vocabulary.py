"""The bytes of every token, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model.

    tokens: `[V]`, the bytes that each adds in the middle of a text; none for those that a grammar never
        allows: special tokens, and the padding of an embedding.
    eos: the tokens that may be chosen where the output may end.
    """

    tokens: tuple[bytes, ...]
    eos: tuple[int, ...]

    @property
    def words(self) -> int:
        """int32 numbers of a mask, `ceil(V / 32)`."""
        return -(-len(self.tokens) // 32)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> Vocabulary:
        """Read the vocabulary of a model with `size` logits."""
        hidden, bytes_of = {*tokenizer.special_ids, *eos}, tokenizer.token_bytes
        tokens = tuple(b"" if token in hidden else bytes_of[token] for token in range(size))
        return cls(tokens, tuple(token for token in eos if 0 <= token < size))
