"""Work that llguidance leaves to its callers: schemas that it would follow in a narrower or a wider sense.

It reads numbers as doubles, takes the 29th of February in any year, lets a key that is spelled with `\\u`
pass for another one, and counts a key that comes twice as two. Here such a schema is rewritten to mean what
it says, or refused by name.
"""

from __future__ import annotations

import re
from typing import Any

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
SUSPECT = re.compile(rf'[0-9]{{{DIGITS + 1}}}|"minProperties"|"format"\s*:\s*"date|[0-9][eE]')
"""In the text of every schema that has to be looked through; the others are not read here."""
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum")
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


def exact(schema: Any, where: str = "#") -> Any:
    """Return a schema with the same values, which llguidance follows to the letter.

    Raises:
        ValueError: there is none; it names the keyword by its JSON pointer.
    """
    if isinstance(schema, list):
        return [exact(part, f"{where}/{place}") for place, part in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in (*NUMBERS, *_VALUES):
            _check_numbers(value, f"{where}/{key}")
            if key.startswith("exclusive") and isinstance(value, int | float) and abs(value) >= NEIGHBOURS:
                raise ValueError(f"{where}/{key} is {value}, and no double is the next integer")
            made[key] = value
        elif key in _UNREAD:
            made[key] = value
        elif key in _MAPS and isinstance(value, dict):
            made[key] = {name: exact(part, f"{where}/{key}/{name}") for name, part in value.items()}
        else:
            made[key] = exact(value, f"{where}/{key}")
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


def _check_numbers(value: Any, where: str) -> None:
    """Raise `ValueError` for a number beyond 64 bits, or one that no double holds."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_numbers(part, where)
        return
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} has {str(value)[:40]}, which is beyond 64 bits")
    try:
        held = isinstance(value, bool) or not isinstance(value, int | float) or float(value) == value
    except OverflowError:
        held = False
    if not held or (isinstance(value, float) and value in (float("inf"), float("-inf"))):
        raise ValueError(f"{where} has {str(value)[:40]}, which no double holds")
