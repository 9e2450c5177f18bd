"""Decode JSON that a model has written, such as the arguments of a tool call."""

from __future__ import annotations

import json
import sys
from typing import Any

from common.json_text import check_json

MAX_PARTS = 10_000
"""Objects, lists and keys of a text that a model has written."""
_LARGEST = sys.float_info.max


def decode_written(text: str) -> dict[str, Any] | None:
    """Return the object that a model has written as JSON; None if the text is no object, or was cut off.

    An empty text is an empty object. The result can be written as JSON again: a number that JSON cannot hold
    becomes the nearest one that it can, and halves of surrogate pairs are replaced.
    """
    try:
        check_json(text.encode("utf-8", "replace"), MAX_PARTS)
        value = json.loads(text or "{}", strict=False, parse_int=_integer)
    except (ValueError, RecursionError):
        return None
    return _encodable(value) if isinstance(value, dict) else None


def _integer(digits: str) -> int | float:
    fits = len(digits) <= 20 and -(1 << 63) <= int(digits) < 1 << 64
    return int(digits) if fits else float(digits)


def _encodable(value: Any) -> Any:
    """Return a copy of a JSON value in which every number is finite and every text can be UTF-8.

    NaN becomes None.
    """
    if isinstance(value, float):
        return min(max(value, -_LARGEST), _LARGEST) if value == value else None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value
