"""JSON from clients, bounded before it is decoded and then read strictly; JSON to clients, on one line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from common.error_lines import type_error
from common.errors import UserError
from common.json_measure import measure_json

MAX_DEPTH = 128
"""Deepest nesting that is taken: what looks through a value recurses."""
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_LINE_ENDS = {"\u2028": b"\\u2028", "\u2029": b"\\u2029", "\x85": b"\\u0085"}
"""Characters of a string that some readers of lines take for an end of the line."""


class FieldError(UserError):
    """Raised for a JSON object with a field that has a wrong type, or is missing.

    field: name of the wrong field; None if the whole object is wrong.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_json(data: bytes, most_parts: int) -> None:
    """Raise `FieldError` for JSON (UTF-8) of too many parts or over 128 levels of nesting; decode nothing.

    most_parts: objects, lists and keys allowed in all. Decoding each takes a microsecond or more, in which a
        server does nothing else. What stands in strings does not count.
    """
    opened = data.count(b"{") + data.count(b"[")
    if opened <= MAX_DEPTH and opened + data.count(b":") <= most_parts:
        return
    parts, depth = measure_json(data)
    if parts > most_parts:
        what = f"has more than {most_parts:,} objects, lists and keys"
        raise FieldError(None, f"the body {what}, which is the limit")
    if depth > MAX_DEPTH:
        what = f"nests deeper than {MAX_DEPTH} levels"
        raise FieldError(None, f"the body {what}, which is the limit")


def decode_object(data: bytes, most_parts: int) -> dict[str, Any]:
    """Return the JSON object in `data`, UTF-8; `FieldError` if it is none, or has over `most_parts` parts."""
    check_json(data, most_parts)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        field = _too_large(data) if "out of range" in str(error) else None
        if field is not None:
            raise FieldError(field, f"{field} holds a number that is out of range") from None
        what = f"no JSON object: {error}" if data.strip() else "empty"
        raise FieldError(None, f"the body is {what}") from None


def _too_large(data: bytes) -> str | None:
    """Return the name of a JSON object's first field that holds a number too large to decode, or None."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # it is no object
        for name, value in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
            try:
                msgspec.json.decode(value)
            except msgspec.ValidationError:
                return name
    return None


def convert_fields(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the msgspec struct `kind` made from `fields`; names that the struct does not have are ignored.

    Raises:
        FieldError: a field has a wrong type or value, or is missing.
    """
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise FieldError(*type_error(str(error), fields)) from None


def encode_json(value: Any) -> bytes:
    """Return a value as JSON, UTF-8, on one line: characters that end a line anywhere are escaped."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for character, escaped in _LINE_ENDS.items():
            data = data.replace(character.encode(), escaped)
    return data
