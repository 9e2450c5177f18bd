"""Marks in a text that comes in pieces: which part of it can be shown."""

from __future__ import annotations


def decided_length(text: str, *marks: str) -> int:
    """Return how many first characters of `text` are decided: its end may be the beginning of a mark."""
    begun = (
        size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])
    )
    return len(text) - max(begun, default=0)
