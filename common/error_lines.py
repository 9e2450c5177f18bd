"""Rewrite error messages of libraries as one line of plain words."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from common.errors import shown

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_DRAWN_REGEX = re.compile(
    r"""(?:invalid\ regex\ .*\ \(in\ regex\):\ )?
    regex\ parse\ error:\n
    \ {4}(?P<pattern>.*)\n
    \ {4}(?P<before>\ *)\^[\ ^]*\n
    (?:.*\n)*?error:\ (?P<why>.*)""",
    re.VERBOSE,
)
_LISTED_SOURCE = re.compile(r"(\n +\d+ \| .*)+(\n *\^+ *(?=\n|$))?")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


def one_line(message: str) -> str:
    """Return a library's error message of several lines as one line that says where the error is.

    Libraries in Rust repeat the source and draw `^` under the wrong character. A number replaces the drawing,
    as in `unclosed group at character 3 of 'ab('`, or `line 2, character 4:` in a grammar; lines and
    characters count from 1.
    """

    def place(found: re.Match[str]) -> str:
        return f"{found['why']} at character {len(found['before']) + 1} of {reprlib.repr(found['pattern'])}"

    message = _DRAWN_REGEX.sub(place, _LISTED_SOURCE.sub("", message))
    return " ".join(_PLACE.sub(r"line \1, character \2: ", message).split())


def visible(text: str) -> str:
    """Return `text` with `?` for every character that is not visible, space, tab or newline.

    Text of strangers (a template, a server, a student) must not steer a terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def type_error(message: str, fields: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return (field, sentence) for an error `message` of msgspec: the wrong field, and what is wrong with it.

    The field is None if the whole object is wrong. The sentence repeats a value that is beyond its limits.
    fields: the values by name that msgspec has refused.
    """
    words, _, where = message.rpartition(" - at ")
    found = re.search(r"`\$\.?([^`]*)`$", where)
    path = found[1] if found else ""
    if missing := re.search(r"required field `(\w+)`", message):
        path = f"{path}.{missing[1]}".lstrip(".")
        return re.split(r"[.[]", path)[0], f"{path} is missing"
    field = re.split(r"[.[]", path)[0] or None
    if value := re.match(r"Invalid enum value (.{1,60})", words):
        written = {"True": "true", "False": "false"}.get(value[1], value[1])  # as in JSON
        return field, f"{path} is not supported with the value {written}"
    if message.startswith("Expected `null`"):
        return field, f"{path} is not supported"
    kinds = re.match(r"Expected `([^`]+)`(?:, got `(\w+)`)?(.*)", words)
    if kinds is None:
        return field, f"{path}: {words or message}"
    names = [_TYPES.get(name, name) for name in kinds[1].split(" | ") if name != "null"]
    got = f", but is {_TYPES.get(kinds[2], kinds[2])}" if kinds[2] else kinds[3]
    path = f"each key of {path}" if where.startswith("`key`") else path
    if kinds[3] and path in fields:
        path = f"{path} is {shown(fields[path])}, but"
    return field, f"{path} must be {' or '.join(names)}{got}"
