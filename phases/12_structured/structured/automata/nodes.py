"""The syntax tree of a pattern or a rule: parsers build it, and `nfa.py` turns it into an automaton."""

from __future__ import annotations

from dataclasses import dataclass

LAST = 0x10FFFF
"""The largest code point."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points or of bytes: (first, last) pairs, both ends included."""


@dataclass(frozen=True)
class Chars:
    """Node of a syntax tree: match one character whose code point is in `ranges`; none matches if empty.

    ranges: (first, last) pairs. quoted: True if the text stands inside a JSON string, where quotes,
        backslashes and control characters are written as escapes.
    """

    ranges: Ranges
    quoted: bool = False


@dataclass(frozen=True)
class Cat:
    """Node of a syntax tree: match all parts one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """Node of a syntax tree: match one of the parts; without parts, no text, not even the empty one."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Node of a syntax tree: match a part `low` to `high` times; `high` None: any number from `low` up."""

    part: Node
    low: int = 0
    high: int | None = None


@dataclass(frozen=True)
class Members:
    """Node of a syntax tree: match the members of a JSON object, in order, with commas between them.

    members: (member, required) pairs; a member that is not required may be left out.
    comma: matches the separator of two members.
    more: a member that may follow these, any number of times; None: no further members.
    """

    members: tuple[tuple[Node, bool], ...]
    comma: Node
    more: Node | None = None


@dataclass(frozen=True)
class Call:
    """Node of a syntax tree: match a text of the rule named `rule`, which may be the caller."""

    rule: str


Node = Chars | Cat | Alt | Repeat | Members | Call
EMPTY = Cat(())


def just(chars: str) -> Ranges:
    """Return ranges of code points, (first, last) pairs, that hold exactly the characters of `chars`."""
    return tuple((ord(char), ord(char)) for char in chars)


def literal(text: str, *, quoted: bool = False) -> Node:
    """Return a syntax tree that matches exactly `text`.

    quoted: True if the text stands inside a JSON string, where quotes and backslashes are written as
        escapes.
    """
    return Cat(tuple(Chars(just(char), quoted) for char in text))


def optional(part: Node) -> Node:
    """Return a syntax tree that matches what `part` matches, or the empty text."""
    return Repeat(part, 0, 1)


def complement(ranges: Ranges) -> Ranges:
    """Return the ranges of all code points that are in none of `ranges`, as ascending (first, last) pairs."""
    found, begin = [], 0
    for low, high in (*sorted(ranges), (LAST + 1, LAST + 1)):
        if begin < low:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(found)
