"""Schemas that llguidance would follow in a narrower or a wider sense than they say.

It reads numbers as doubles, takes the 29th of February in any year, lets a key that is spelled with `\\u`
pass for another one, counts a key that comes twice as two, and leaves out of a string what it cannot write.
Here such a schema is rewritten to mean what it says, or refused by name.
"""

from __future__ import annotations

import re
from typing import Any

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
    rf'"format"\s*:\s*"date|{OLDER.pattern}'
)
"""In the text of every schema that has to be looked through; the others are not read here. Behind a backslash
a character may be hidden."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON escapes by number, or that the library does not write: it would leave them out."""
_SPELLED = (
    rf"(?:{_CONTROL.pattern}|\\[av]|\\(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
    r"|\\[xu]\{0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\})"
)
_CLASSES = re.compile(rf"\[\^(?:\\.|[^\]\\])*\]|{_SPELLED}-(?:\\.|[^\]\\])")
"""Parts of a pattern in which these may stand: classes of all other characters, and ranges."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum")
_REFERRED = ("$ref", "$schema", "$defs", "definitions")
_UNREAD = ("default", "examples", "example", "description", "title", "$comment")

_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAYS = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"({_YEAR}-{_DAYS}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
"""RFC 3339's full-date, from year 1 on."""
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{_CLOCK}:[0-5][0-9]([.][0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
"""Its full-time, without leap seconds."""
PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}T{TIME}$"}


def exact(schema: Any, where: str = "#", *, older: bool = False) -> Any:
    """Return a schema with the same values, which llguidance follows to the letter.

    Args:
        schema: JSON.
        where: its JSON pointer.
        older: whether it is of an `OLDER` dialect.

    Raises:
        ValueError: there is none; it names the keyword by its JSON pointer.
    """
    if isinstance(schema, list):
        return [exact(part, f"{where}/{place}", older=older) for place, part in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    if where == "#":
        older = bool(OLDER.search(str(schema.get("$schema"))))
        if OWN_OPTIONS in schema:
            raise ValueError(f"#/{OWN_OPTIONS} is not known here")
    if older and isinstance(schema.get("$ref"), str):
        schema = {key: part for key, part in schema.items() if key in _REFERRED}
    made: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{where}/{key}"
        if key in (*NUMBERS, *_VALUES):
            _check_value(value, place)
            if key.startswith("exclusive") and isinstance(value, int | float) and abs(value) >= NEIGHBOURS:
                raise ValueError(f"{place} is {value}, and no double is the next integer")
        for pattern in [value] if key == "pattern" else value if key == "patternProperties" else ():
            if isinstance(pattern, str) and re.search(_SPELLED, _CLASSES.sub("", pattern)):
                raise ValueError(f"{place} has a control character, which is never written")
        if key in _VALUES or key in _UNREAD:
            made[key] = value
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: exact(part, f"{place}/{name}", older=older) for name, part in value.items()}
        else:
            made[key] = exact(value, place, older=older)
    required, least = schema.get("required"), schema.get("minProperties")
    named = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least - named > 1:
        raise ValueError(
            f"{where}/minProperties is {least}, of which {named} keys are required: a key that comes twice "
            "would count as two"
        )
    pattern = PATTERNS.get(made["format"]) if isinstance(made.get("format"), str) else None
    if pattern is not None:
        del made["format"]
        if "pattern" in made:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
        else:
            made["pattern"] = pattern
    return made


def _check_value(value: Any, where: str) -> None:
    """Raise `ValueError` for a number or a character that the library does not keep."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for part in value:
            _check_value(part, where)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise ValueError(f"{where} has a control character, which is never written")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} has {str(value)[:40]}, which is beyond 64 bits")
    elif isinstance(value, int | float) and not (abs(value) < float("inf") and float(value) == value):
        raise ValueError(f"{where} has {str(value)[:40]}, which no double holds")
