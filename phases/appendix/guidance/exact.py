"""Rewrite JSON schemas that llguidance would follow in a narrower or wider sense than they say.

The library reads numbers as doubles, takes the 29th of February in any year, lets a key that is spelled with
`\\u` pass for another one, counts a key that comes twice as two, leaves out of a string what it cannot write,
and reads patterns as Rust's.
Such a schema is rewritten to mean what it says, or refused by name.
"""

from __future__ import annotations

import re
from typing import Any

from phases.appendix.guidance.patterns import CONTROL, rewrite_pattern

OWN_OPTIONS = "x-guidance"
"""The key under which a schema has options for the library. Some let through what does not validate, or is no
JSON, so a schema may have none."""
OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Models like to indent; without a limit some write white space for ever, and every mask lets them. An escape
by number is left out: it would spell a named key in a second way. What cannot be written then are control
characters other than these five; every other character stands for itself."""

LARGEST = 2**63 - 1
"""llguidance reads larger integers as something else; -2**63, whose magnitude overflows, ends the process."""
NEIGHBOURS = 2**53
"""From here on the integer beside a double may be none."""
DIGITS = 15
"""Every integer of so many digits is a double."""
OLDER = re.compile(r"json-schema\.org/draft-0[3467]/")
"""Dialects in which a `$ref` overrules what stands beside it; to the library it does in none."""
SUSPECT = re.compile(
    rf'\\|\x7f|[0-9]{{{DIGITS + 1}}}|[0-9][eE]|"(?:minProperties|{OWN_OPTIONS})"|'
    rf'"format"\s*:\s*"(?:date|time)|"pattern|{OLDER.pattern}'
)
"""In the text of every schema that has to be looked through; the others are not read here. Behind a backslash
a character may be hidden."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum")
_REFERRED = ("$ref", "$schema", "$defs", "definitions")
_UNREAD = ("default", "examples", "example", "description", "title", "$comment")
ENFORCED: dict[str, Any] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), dict),
    **dict.fromkeys(("anyOf", "allOf", "prefixItems", "enum", "required"), list),
    **dict.fromkeys(("$ref", "pattern", "format"), str),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), int | float),
    **dict.fromkeys(("type", "const", "additionalProperties", "items", *NUMBERS), object),
}
"""Keywords of a hint that grammars know, and the types of their values."""
FORMATS = (
    "date",
    "date-time",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
SILENT = {
    *_UNREAD,
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$id",
    "$anchor",
    "nullable",
    "discriminator",
    "xml",
    "externalDocs",
    "contentEncoding",
    "contentMediaType",
    "unevaluatedProperties",
}
"""Keywords that ask for nothing a value could break; `unevaluatedProperties` is what grammars do anyway."""
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LONG_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTHS = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DAYS = f"({_LONG_MONTHS}|{_SHORT_MONTHS}|02-(0[1-9]|1[0-9]|2[0-8]))"
DATE = f"({_YEAR}-{_DAYS}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
"""RFC 3339's full-date, from year 1 on."""
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{_CLOCK}:[0-5][0-9]([.][0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
"""Its full-time, without leap seconds."""
PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}T{TIME}$", "time": f"^{TIME}$"}


def exact(
    schema: Any, where: str = "#", *, older: bool = False, left: list[str] | None = None
) -> Any:
    """Return a JSON schema that allows the same values and that llguidance follows to the letter.

    Args:
        schema: the schema, or a part of it.
        where: JSON pointer of that part, for errors.
        older: whether its JSON Schema dialect is draft 7 or before, in which `$ref` hides its neighbours.
        left: None: every keyword must be followed. A list: the schema is only a hint (of a tool that is not
            strict), so keywords that cannot be followed are left out, and their JSON pointers are appended to
            the list. Keywords that restrict nothing, such as `title`, are left out and not appended.

    Raises:
        ValueError: `left` is None and a keyword cannot be followed; the message has its JSON pointer.
    """
    if isinstance(schema, list):
        parts = enumerate(schema)
        return [
            exact(part, f"{where}/{place}", older=older, left=left) for place, part in parts
        ]
    if not isinstance(schema, dict):
        return schema
    if where == "#":
        older = bool(OLDER.search(str(schema.get("$schema"))))
    if older and isinstance(schema.get("$ref"), str):
        schema = {key: part for key, part in schema.items() if key in _REFERRED}
    made: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{where}/{key}"
        silent = key in SILENT or key.startswith("x-") or (value is None and key != "const")
        if left is not None and silent:
            continue
        if left is not None and key == "oneOf" and "anyOf" not in schema:
            key = "anyOf"
        try:
            _check(key, value, place, hint=left is not None)
            if key == "pattern" and isinstance(value, str):
                value = rewrite_pattern(value, place)
            if key == "patternProperties" and isinstance(value, dict):
                value = _rewrite_names(value, place)
        except ValueError:
            if left is None:
                raise
            left.append(place)
            continue
        if key in _VALUES or key in _UNREAD:
            made[key] = value
        elif key in _MAPS and isinstance(value, dict):
            named = value.items()
            made[key] = {
                name: exact(part, f"{place}/{name}", older=older, left=left)
                for name, part in named
            }
        else:
            made[key] = exact(value, place, older=older, left=left)
    required, least = made.get("required"), made.get("minProperties")
    count = len({*map(str, required)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least - count > 1:
        raise ValueError(
            f"{where}/minProperties is {least}, of which {count} keys are required: a key that comes twice "
            "would count as two"
        )
    pattern = PATTERNS.get(made["format"]) if isinstance(made.get("format"), str) else None
    if pattern is not None:
        del made["format"]
        if "pattern" in made:
            also = made.get("allOf", [])
            made["allOf"] = [*also, {"pattern": pattern}] if isinstance(also, list) else also
        else:
            made["pattern"] = pattern
    return made


def _check(key: str, value: Any, where: str, *, hint: bool) -> None:
    """Raise `ValueError` if llguidance cannot follow a schema's keyword `key` with this `value`.

    where: JSON pointer of the keyword, for the error. hint: whether the schema need not be enforced; then
        keywords and formats that llguidance does not enforce are refused, too; the caller leaves them out.
    """
    if where == f"#/{OWN_OPTIONS}":
        raise ValueError(f"{where} is not known here")
    if key in (*NUMBERS, *_VALUES):
        _check_value(value, where)
        if (
            key.startswith("exclusive")
            and isinstance(value, int | float)
            and abs(value) >= NEIGHBOURS
        ):
            raise ValueError(f"{where} is {value}, and no double is the next integer")
    if hint and (
        key not in ENFORCED
        or not isinstance(value, ENFORCED[key])
        or (key == "format" and value not in FORMATS)
    ):
        raise ValueError(f"{where} cannot be followed")


def _rewrite_names(properties: dict[str, Any], where: str) -> dict[str, Any]:
    """Rewrite the keys of a schema's `patternProperties` for llguidance; return the new dictionary.

    properties: pattern of names -> schema. where: JSON pointer of `properties`, for errors.

    Raises:
        ValueError: a pattern cannot be followed, or two become the same.
    """
    made = {rewrite_pattern(name, where): part for name, part in properties.items()}
    if len(made) < len(properties):
        raise ValueError(f"{where} has two patterns of one meaning")
    return made


def _check_value(value: Any, where: str) -> None:
    """Raise `ValueError` if llguidance would change numbers or characters in a keyword's `value`.

    value: such as that of `enum`; its parts are checked, too. where: JSON pointer of the keyword, for the
        error.
    """
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for part in value:
            _check_value(part, where)
    elif isinstance(value, str) and CONTROL.search(value):
        raise ValueError(f"{where} has a control character, which is never written")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} has {str(value)[:40]}, which is beyond 64 bits")
    elif isinstance(value, int | float) and not (
        abs(value) < float("inf") and float(value) == value
    ):
        raise ValueError(f"{where} has {str(value)[:40]}, which no double holds")
