"""Texts of a chat message's content that is a list of parts and not one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError, shown, text

NOTHING: tuple[Any, ...] = (None, [], {})
"""Values of a field that mean the same as its absence."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts -> the field that holds the text."""


def texts_of_parts(name: str, parts: Sequence[Any], ignored: set[str]) -> list[str]:
    """Return the text of each part of a chat message's content.

    name: of the content, for error messages. parts: objects with a type and a text. ignored: gets the names
        of a part's other fields.

    Raises:
        UserError: a part is no text.
    """
    return [_part(f"{name}[{place}]", part, ignored) for place, part in enumerate(parts)]


def _part(name: str, part: Any, ignored: set[str]) -> str:
    """Return the text of one part of a chat message's content. Raises `UserError` if it is no text.

    name: of the part, for error messages. ignored: gets the names of its other fields.
    """
    if not isinstance(part, Mapping):
        form = "must be an object with a type and a text"
        raise UserError(f"{name} is {shown(part)}, but {form}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise UserError(f"{name}.type is {shown(kind)}, but must be 'text'")
    others = part.keys() - {"type", *_TEXTS.values()}
    ignored |= {other for other in others if part[other] not in NOTHING}
    field = _TEXTS[kind]
    return text(f"{name}.{field}", part.get(field, None))
