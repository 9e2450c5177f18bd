"""Decode the arguments of calls, which a model has written: what JSON allows a model may write."""

from __future__ import annotations

import json
import sys
from typing import Any

from serving.http.errors import ApiError
from serving.http.schema import check_parts

MAX_PARTS = 10_000
"""Of one call's arguments."""
_LARGEST = sys.float_info.max


def decode_arguments(text: str) -> dict[str, Any] | None:
    """Return the object that a text of JSON stands for; None if it is none, or was cut off.

    Whatever comes back can be written as JSON again: numbers without a form are the nearest that have one, and
    halves of surrogate pairs are replaced.
    """
    try:
        check_parts(text.encode("utf-8", "replace"), MAX_PARTS)
        value = json.loads(text or "{}", strict=False, parse_int=_integer)
    except (ApiError, ValueError, RecursionError):
        return None
    return _encodable(value) if isinstance(value, dict) else None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 and -(1 << 63) <= int(digits) < 1 << 64 else float(digits)


def _encodable(value: Any) -> Any:
    """Return a value in which every number is finite and every text has a UTF-8 form."""
    if isinstance(value, float):
        return min(max(value, -_LARGEST), _LARGEST) if value == value else None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value
