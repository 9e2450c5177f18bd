"""Languages as expressions: what the readers of patterns and schemas make, and what automata are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structured.automata.dfa import Dfa

LAST = 0x10FFFF
"""The largest code point."""

Ranges = tuple[tuple[int, int], ...]
"""Code points or bytes: ascending ranges that do not touch, both ends included."""


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


@dataclass(frozen=True, eq=False)
class Automaton:
    """A language that is an automaton already, such as what two others have in common."""

    dfa: Dfa


Node = Chars | Cat | Alt | Repeat | Members | Call | Automaton
EMPTY = Cat(())


def literal(text: str, *, quoted: bool = False) -> Node:
    """Exactly this text."""
    return Cat(tuple(Chars(((ord(char), ord(char)),), quoted) for char in text))


def optional(part: Node) -> Node:
    """This or nothing."""
    return Repeat(part, 0, 1)


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges in order, those that touch joined."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges, last: int = LAST) -> Ranges:
    """Every code point up to `last` that is not in the ranges."""
    found, begin = [], 0
    for low, high in ranges:
        if begin < low:
            found.append((begin, low - 1))
        begin = high + 1
    if begin <= last:
        found.append((begin, last))
    return tuple(found)


def quoted(node: Node) -> Node:
    """The same language, each character as it is written inside a JSON string."""
    if isinstance(node, Chars):
        return Chars(node.ranges, quoted=True)
    if isinstance(node, (Cat, Alt)):
        return type(node)(tuple(quoted(part) for part in node.parts))
    if isinstance(node, Repeat):
        return Repeat(quoted(node.part), node.low, node.high)
    raise AssertionError(f"{type(node).__name__} does not come from a pattern")
