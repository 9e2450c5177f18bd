"""Format numbers for sentences."""

from __future__ import annotations


def count(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: `1 request`, `2 requests` or `1,234 requests`.

    things: the plural, if it is not `thing` with an s.
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
