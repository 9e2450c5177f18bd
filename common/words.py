"""Numbers in sentences."""

from __future__ import annotations


def count(number: int, thing: str, things: str = "") -> str:
    """Return `1 request`, `2 requests` or `1,234 requests`. things: a plural that is not thing and an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
