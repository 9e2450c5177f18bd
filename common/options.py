"""Options as fields of dataclasses: each has a default and a line of help.

The same field is a keyword of `load`, a flag of the command line and a key of a configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any

from common.errors import UserError, boolean, integer, number
from common.names import choice, unknown


def option(default: Any, help: str, **limits: Any) -> Any:
    """Return a dataclass field with a default and a help text.

    help: one line, in the words of a user who wants to set it. limits: `choices`, the allowed strings; or
        `low` and `high` of a number, both included; with `above_low` True, `low` itself is too small.
    """
    return field(default=default, metadata={"help": help, **limits})


def check_options(options: Any) -> None:
    """Check each field of a dataclass whose fields `option` made. Numpy integers become ints, in place.

    None is allowed for a field whose default is None.

    Raises:
        UserError: a value has the wrong type, or is out of the field's limits.
    """
    for item in fields(options):
        name, value = item.name, vars(options)[item.name]
        limits = {key: limit for key, limit in item.metadata.items() if key != "help"}
        kind = str(item.type).partition(" ")[0]
        if value is None and item.default is None:
            continue
        if "choices" in limits:
            choice(name, value, limits["choices"])
        elif kind == "bool":
            boolean(name, value)
        elif kind == "int":
            object.__setattr__(options, name, integer(name, value, **limits))
        elif kind == "float":
            number(name, value, **limits)


def names(kind: type) -> tuple[str, ...]:
    """Return the names of the options (fields) that the dataclass `kind` has, in order."""
    return tuple(item.name for item in fields(kind))


def route(
    options: Mapping[str, Any], kinds: Sequence[type], others: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return options (values by name), distributed over the dataclasses that define them.

    Args:
        options: values by name.
        kinds: dataclasses of options; no two may define the same name.
        others: names that the caller handles itself; they are in none of the results.

    Returns:
        For each dataclass, a dictionary of its own options.

    Raises:
        UserError: no class has an option of that name; the message has the nearest names.
    """
    owner: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        for name in names(kind):
            if name in owner or name in others:
                raise AssertionError(
                    f"{name} is an option of {kind.__name__} and of something else"
                )
            owner[name] = place
    dealt: list[dict[str, Any]] = [{} for _ in kinds]
    for name, value in options.items():
        if name in owner:
            dealt[owner[name]][name] = value
        elif name not in others:
            raise UserError(unknown(name, [*owner, *others]))
    return dealt
