"""The part of a tokenizer that a library sees beyond its tokens: how it spells a text that is forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import tokenizers
from tokenizers.decoders import ByteLevel

from common.text.tokenizer import Tokenizer
from structured.vocabulary import Vocabulary

_KEEPING = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts"}
"""Pre-tokenizers that only cut a text, unless they are told to remove what they cut at."""


@dataclass(frozen=True, eq=False)
class Spelling(Vocabulary):
    """The tokens of a model, and how they spell a text.

    encode: tokens whose bytes are a text's.
    source: a tokenizer of byte-level tokens as a `tokenizer.json`, without what would change a text, for
        libraries that read one. None: there is only `encode`.
    changed: names in a text that `source` reads as tokens with other bytes, or with none: special tokens.
    """

    encode: Callable[[str], Sequence[int]]
    source: str | None = None
    changed: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, eos: Sequence[int]) -> Self:
        """Read the vocabulary of a model with `size` logits."""
        plain = Vocabulary.of(tokenizer, size, eos)
        hidden = {*tokenizer.special_ids, *eos}
        added = tokenizer.backend.get_added_tokens_decoder()
        changed = (
            one.content
            for token, one in added.items()
            if token in hidden or one.lstrip or one.rstrip
        )
        encode, source = Encoder(tokenizer.backend, plain.tokens), _source(tokenizer.backend)
        return cls(
            plain.tokens, plain.eos, encode, source, () if source is None else tuple(changed)
        )


class Encoder:
    """Makes tokens of a text in the middle of another, whose bytes are exactly that text.

    A tokenizer may set a space before a text, compose or lower its letters, and take names for special
    tokens. Its own tokens are the ones that a model has seen, so they are taken where they keep the bytes: of
    the text alone, or behind a line break. Elsewhere the longest token that fits comes next.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Sequence[bytes]) -> None:
        self._backend, self._tokens = backend, tokens
        self._ids = {data: token for token, data in enumerate(tokens) if data}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens of as much of the text as there are tokens for."""
        data = text.encode()
        for before in ("", "\n"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            for start in range(
                min(3, len(ids))
            ):  # what stands before the text is two tokens at most
                pieces = [
                    self._tokens[token] if token < len(self._tokens) else b""
                    for token in ids[start:]
                ]
                if all(pieces) and b"".join(pieces) == data:
                    return ids[start:]
        return list(self._longest_first(data))

    def _longest_first(self, data: bytes) -> Iterator[int]:
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                return
            yield self._ids[data[:size]]
            data = data[size:]


def _source(backend: tokenizers.Tokenizer) -> str | None:
    """See `Spelling.source`: None of a tokenizer that changes a text in a way that is not known here."""
    if not isinstance(backend.decoder, ByteLevel):
        return None
    cutter = (
        {}
        if backend.pre_tokenizer is None
        else json.loads(backend.pre_tokenizer.__getstate__())
    )
    steps = [step for step in cutter.get("pretokenizers", [cutter]) if step]
    if any(
        step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps
    ):
        return None
    source = backend.to_str()
    if backend.normalizer is None and not any(step.get("add_prefix_space") for step in steps):
        return source
    whole: dict[str, Any] = json.loads(source)
    steps = [
        step | {"add_prefix_space": False} if "add_prefix_space" in step else step
        for step in steps
    ]
    whole |= {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }
    return json.dumps(whole, ensure_ascii=False)
