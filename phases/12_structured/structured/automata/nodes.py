"""The syntax tree of a pattern or a rule: parsers build it, and `nfa.py` turns it into an automaton."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 0x10FFFF
"""The largest code point."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points or of bytes: (first, last) pairs, both ends included."""


@dataclass(frozen=True)
class Chars:
    """Match one character whose code point is in `ranges`, (first, last) pairs; with no ranges, match
    nothing.

    quoted: True if the text stands inside a JSON string, where quotes, backslashes and control characters
        are written as escapes.
    """

    ranges: Ranges
    quoted: bool = False


@dataclass(frozen=True)
class Cat:
    """A syntax tree's node: match all parts one after the other; with no parts, match the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """A syntax tree's node: match one of the parts; with no parts, match no text at all, not even the empty
    one.
    """

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A syntax tree's node: match a part `low` to `high` times; `high` None: any number from `low` up."""

    part: Node
    low: int = 0
    high: int | None = None


@dataclass(frozen=True)
class Members:
    """Match the members of a JSON object, in order, with a comma between each two that are present.

    members: (member, required) pairs; a member that is not required may be left out.
    comma: what separates two members.
    more: a member that may follow these, any number of times; None: no further members.
    """

    members: tuple[tuple[Node, bool], ...]
    comma: Node
    more: Node | None = None


@dataclass(frozen=True)
class Call:
    """Match a text of the rule named `rule`; rules may call each other and themselves."""

    rule: str


Node = Chars | Cat | Alt | Repeat | Members | Call
EMPTY = Cat(())


def just(chars: str) -> Ranges:
    """Return the ranges of code points that hold the characters of `chars` only."""
    return tuple((ord(char), ord(char)) for char in chars)


def literal(text: str, *, quoted: bool = False) -> Node:
    """Return a node that matches exactly this text.

    quoted: whether the text stands inside a JSON string, with quotes and backslashes written as escapes.
    """
    return Cat(tuple(Chars(just(char), quoted) for char in text))


def optional(part: Node) -> Node:
    """Return a node that matches a part or the empty text."""
    return Repeat(part, 0, 1)


def complement(ranges: Ranges) -> Ranges:
    """Return the ranges of all code points that are in none of the given ranges of code points."""
    found, begin = [], 0
    for low, high in (*sorted(ranges), (LAST + 1, LAST + 1)):
        if begin < low:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(found)
