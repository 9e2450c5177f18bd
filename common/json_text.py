"""JSON from outside: bounded first, then read strictly from clients, and tolerantly from models."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from common.errors import UserError

MAX_DEPTH = 128
"""Deepest nesting that is taken: what looks through a value recurses."""
MAX_PARTS = 10_000
"""Objects, lists and keys of a text that a model has written."""
_QUOTE = ord('"')
_PARTS = np.isin(np.arange(256), list(b"{[:"))
_STEPS = np.isin(np.arange(256), list(b"{[")).astype(np.int32) - np.isin(
    np.arange(256), list(b"}]")
)
_LARGEST = sys.float_info.max
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
T = TypeVar("T")


class FieldError(UserError):
    """Raised for a JSON object with a field that has a wrong type, or is missing.

    field: its name; None if the whole object is wrong.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_json(data: bytes, most_parts: int) -> None:
    """Raise `FieldError` for JSON of too many parts, or nested too deeply, before it is decoded: `data`,
    UTF-8.

    most_parts: values and names allowed in all. Each part costs a microsecond or more in which a server does
    nothing else. What stands in strings does not count.
    """
    opened = data.count(b"{") + data.count(b"[")
    if opened <= MAX_DEPTH and opened + data.count(b":") <= most_parts:
        return
    text = np.frombuffer(data.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    outside = ~np.bitwise_xor.accumulate(text == _QUOTE)
    if np.count_nonzero(_PARTS[text] & outside) > most_parts:
        raise FieldError(
            None,
            f"the body has more than {most_parts:,} objects, lists and keys, which is the limit",
        )
    if np.cumsum(_STEPS[text] * outside).max(initial=0) > MAX_DEPTH:
        raise FieldError(
            None, f"the body nests deeper than {MAX_DEPTH} levels, which is the limit"
        )


def decode_object(data: bytes, most_parts: int) -> dict[str, Any]:
    """Return the JSON object in `data`, UTF-8. Raises `FieldError` if it is none, or has over `most_parts`
    parts.
    """
    check_json(data, most_parts)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        field = _too_large(data) if "out of range" in str(error) else None
        if field is not None:
            raise FieldError(field, f"{field} holds a number that is out of range") from None
        raise FieldError(None, f"the body is no JSON object: {error}") from None


def _too_large(data: bytes) -> str | None:
    """Return the name of an object's first field that holds a number out of range; None: no field does."""
    for name, value in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            return name
    return None


def convert_fields(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return an object of the msgspec struct `kind` made from `fields`; names that it lacks are ignored.

    Raises:
        FieldError: a field has a wrong type or value, or is missing.
    """
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise FieldError(*_in_words(str(error))) from None


def _in_words(message: str) -> tuple[str | None, str]:
    """Return the field in msgspec's error message (None: the whole object), and the complaint as a
    sentence.
    """
    found = re.search(r"`\$\.?([^`]*)`$", message)
    path = found[1] if found else ""
    if missing := re.search(r"required field `(\w+)`", message):
        path = f"{path}.{missing[1]}".lstrip(".")
        return re.split(r"[.[]", path)[0], f"{path} is missing"
    field = re.split(r"[.[]", path)[0] or None
    if value := re.match(r"Invalid enum value (.{1,60})", message.partition(" - at ")[0]):
        return field, f"{path} is not supported with the value {value[1]}"
    if message.startswith("Expected `null`"):
        return field, f"{path} is not supported"
    kinds = re.match(r"Expected `([^`]+)`(?:, got `(\w+)`)?(.*?) - at", message)
    if kinds is None:
        return field, f"{path}: {message}"
    names = [_TYPES.get(name, name) for name in kinds[1].split(" | ") if name != "null"]
    got = f", but is {_TYPES.get(kinds[2], kinds[2])}" if kinds[2] else kinds[3]
    return field, f"{path} must be {' or '.join(names)}{got}"


def decode_written(text: str) -> dict[str, Any] | None:
    """Return the object that a model has written as JSON; None if the text is no object, or was cut off.

    Whatever comes back can be written as JSON again: a number that has no form there becomes the nearest that
    has one, and halves of surrogate pairs are replaced.
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
    """Return a copy of a JSON value in which every number is finite and every text has a UTF-8 form."""
    if isinstance(value, float):
        return min(max(value, -_LARGEST), _LARGEST) if value == value else None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value
