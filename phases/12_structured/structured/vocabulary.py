"""What a grammar sees of a tokenizer: the bytes of every token, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers.decoders import ByteLevel

from common.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model.

    tokens: `[V]`, the bytes that each adds to a text; none for those that a grammar never allows: special
        tokens, and the padding of an embedding.
    eos: the tokens that may be chosen where the output may end.
    encode: the tokens that the model's tokenizer would make of a text.
    source: the tokenizer as a `tokenizer.json`, for those who read one: of a tokenizer whose tokens are
        bytes, about which two readers cannot disagree. None: there is only `encode`.
    """

    tokens: tuple[bytes, ...]
    eos: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]
    source: str | None = None

    @property
    def words(self) -> int:
        """int32 numbers of a mask, `ceil(V / 32)`."""
        return -(-len(self.tokens) // 32)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> Vocabulary:
        """The vocabulary of a model with `size` logits."""
        hidden = {*tokenizer.special_ids, *eos}
        tokens = tuple(b"" if token in hidden else _bytes_of(tokenizer, token) for token in range(size))

        def encode(text: str) -> Sequence[int]:
            return tokenizer.backend.encode(text, add_special_tokens=False).ids

        in_bytes = isinstance(tokenizer.backend.decoder, ByteLevel)
        source = tokenizer.backend.to_str() if in_bytes else None
        return cls(tokens, tuple(token for token in eos if 0 <= token < size), encode, source)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes in the middle of a text."""
    found = tokenizer.token_bytes[token]
    if found is not None:
        return found
    # SentencePiece's decoder strips a space at the beginning of a text, and only there.
    piece = tokenizer.backend.id_to_token(token)
    return piece.replace("\u2581", " ").encode() if piece else b""
