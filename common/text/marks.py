"""Search for marks (such as stop strings) in a text that comes in pieces."""

from __future__ import annotations


def decided_length(text: str, *marks: str) -> int:
    """Return how many first characters of `text` can be shown: all but an end that may begin a mark."""
    begun = (
        size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])
    )
    return len(text) - max(begun, default=0)
