"""Read JSON of other programs with limits, and check it field by field.

A checkpoint's files come from anywhere. A value that is read through this module either is what its `Field`
says, or is refused in one line; so no later code has to check it again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UserError, integer, number, shown
from common.files import read_bytes

MOST_BYTES = 1 << 24
"""Most bytes of a JSON file. A `config.json` has some thousand, the index of the largest published checkpoint
nine million.
"""

_REQUIRED = object()
_KINDS = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path``.

    Raises:
        UserError: the file cannot be read, is no regular file, is larger than `MOST_BYTES`, is not the JSON
            of RFC 8259 (which has no NaN and no Infinity), has the same key twice, or is no object.
    """
    try:
        content = read_bytes(path, MOST_BYTES).decode()
        raw = json.loads(content, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        # JSON's, UTF-8's, and Python's for an integer of thousands of digits.
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}, but must hold an object")
    return raw


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    raw = dict(pairs)
    if len(raw) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} is there twice")
    return raw


@dataclass(frozen=True)
class Field:
    """The name of one fact in a JSON object, and its allowed values.

    ``names`` are its spellings, separated by spaces; if an object has several, their values must agree.
    Numbers lie between ``low`` and ``high``, both included; strings are one of ``choices``, if there are any.
    A field that is absent or null has its ``default``; one without a default is required. With
    ``null_counts``, null is read as None and not as the default.
    """

    names: str
    kind: type
    low: float = 0
    high: float = 0
    default: Any = _REQUIRED
    choices: tuple[str, ...] = ()
    null_counts: bool = False

    def read(self, raw: Mapping[str, Any]) -> Any:
        """Return this field's value in the object ``raw``, or its default.

        Raises:
            UserError: the field is missing, of another type, or out of its limits, or its spellings have
                different values.
        """
        names = self.names.split()
        found = {name: raw[name] for name in names if raw.get(name) is not None}
        for first, value in found.items():
            for name, other in found.items():
                if other != value:
                    raise UserError(
                        f"{first} is {shown(value)}, but {name} {shown(other)} means the same field"
                    )
            return self.check(value, first)
        if self.null_counts and any(name in raw for name in names):
            return None
        if self.default is _REQUIRED:
            raise UserError(f"there is no field {names[0]!r}")
        return self.default

    def check(self, value: Any, name: str) -> Any:
        """Return ``value`` if it fits this field; an integer becomes a float if the field holds floats.

        Raises:
            UserError: the value does not fit. The message calls it ``name``.
        """
        if self.kind is int:
            return integer(name, value, low=int(self.low), high=int(self.high))
        if self.kind is float:
            return number(name, value, low=self.low, high=self.high)
        if not isinstance(value, self.kind):
            raise UserError(f"{name} is {shown(value)}, but must be {_KINDS[self.kind]}")
        if self.choices and value not in self.choices:
            raise UserError(
                f"{name} {shown(value)} is not supported, only {', '.join(self.choices)}"
            )
        return value
