"""Languages as expressions: what the readers of patterns and schemas make, and what automata are made of."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 0x10FFFF
"""The largest code point."""

Ranges = tuple[tuple[int, int], ...]
"""Code points or bytes, from one to another, both included."""


@dataclass(frozen=True)
class Chars:
    """One character of some ranges of code points.

    quoted: as it is written inside a JSON string, where some characters take an escape.
    """

    ranges: Ranges
    quoted: bool = False


@dataclass(frozen=True)
class Cat:
    """One part after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """One of its parts; without parts, nothing at all."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`low` to `high` times the same; None: without an end."""

    part: Node
    low: int = 0
    high: int | None = None


@dataclass(frozen=True)
class Members:
    """Parts in order with a comma between any two that are there.

    members: each with whether it must be there.
    more: what may follow, any number of times.
    """

    members: tuple[tuple[Node, bool], ...]
    comma: Node
    more: Node | None = None


@dataclass(frozen=True)
class Call:
    """A text of another rule, which may call this one again."""

    rule: str


Node = Chars | Cat | Alt | Repeat | Members | Call
EMPTY = Cat(())


def literal(text: str, *, quoted: bool = False) -> Node:
    """Make exactly this text."""
    return Cat(tuple(Chars(((ord(char), ord(char)),), quoted) for char in text))


def optional(part: Node) -> Node:
    """Make this or nothing."""
    return Repeat(part, 0, 1)


def complement(ranges: Ranges) -> Ranges:
    """Return every code point that is not in the ranges."""
    found, begin = [], 0
    for low, high in (*sorted(ranges), (LAST + 1, LAST + 1)):
        if begin < low:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(found)


def quoted(node: Node) -> Node:
    """Return the same language, each character as it is written inside a JSON string."""
    if isinstance(node, Chars):
        return Chars(node.ranges, quoted=True)
    if isinstance(node, (Cat, Alt)):
        return type(node)(tuple(quoted(part) for part in node.parts))
    if isinstance(node, Repeat):
        return Repeat(quoted(node.part), node.low, node.high)
    raise AssertionError(f"{type(node).__name__} does not come from a pattern")
