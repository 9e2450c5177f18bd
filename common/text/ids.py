"""Text to token ids and back by the library, without holding up other threads."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

LONG = 2000
"""Characters, or ids, above which the library is asked in the way that lets Python's lock go. It is the
dearer way for a short text."""


def ids_of(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The token ids of a text.

    `encode` holds Python's lock until it is done, which for a megabyte takes seconds: all threads wait, the
    event loop of a server among them. `encode_batch_fast` lets it go; it leaves out only offsets.
    """
    if len(text) <= LONG:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(found.ids)


def text_of(backend: tokenizers.Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids. `decode` holds Python's lock, and `decode_batch` lets it go."""
    if len(ids) <= LONG:
        return str(backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
    (found,) = backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
    return str(found)
