"""The parts of a message's content, where it is no text but a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError, shown, text

NOTHING: tuple[Any, ...] = (None, [], {})
"""Values of a field that mean the same as its absence."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts -> the field that holds the text."""


def texts_of_parts(name: str, parts: Sequence[Any], ignored: set[str]) -> list[str]:
    """Return the text of each part of the content `name`. ignored: gets the names of other fields.

    Raises:
        UserError: a part is no text.
    """
    return [_part(f"{name}[{place}]", part, ignored) for place, part in enumerate(parts)]


def _part(name: str, part: Any, ignored: set[str]) -> str:
    """Return the text of the part `name` of a message's content. ignored: gets names of other fields."""
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
