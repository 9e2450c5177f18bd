"""Check names of which a user has to choose one; the error for another name suggests the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from common.errors import UserError, shown


def near(value: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known text nearest to `value`, or "" if none is near."""
    found = get_close_matches(value[:100], list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of `allowed`. Raises `UserError` that lists them and suggests the nearest.

    name: the option's, for the message.
    """
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    hint = near(value, names) if isinstance(value, str) else ""
    raise UserError(f"{name} is {shown(value)}, but must be one of {', '.join(names)}{hint}")


def unknown(name: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown option `name`; it suggests the nearest of `known`."""
    found = get_close_matches(name, known, n=3)
    what = (
        f"did you mean {' or '.join(found)}?"
        if found
        else f"the options are {', '.join(sorted(known))}"
    )
    return f"{name!r} is no option here: {what}"
