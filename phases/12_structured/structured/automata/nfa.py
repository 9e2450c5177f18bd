"""From a syntax tree to a nondeterministic automaton over bytes (Thompson, CACM 1968)."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import UserError
from structured.automata.deadline import check
from structured.automata.nodes import (
    Alt,
    Cat,
    Chars,
    Members,
    Node,
    Ranges,
    Repeat,
    complement,
)

MOST_STATES = 60_000
CALLS = 256
"""Symbols from 256 on are calls of rules; symbols below are bytes."""

Edge = tuple[int, int, int]
"""First symbol, last symbol, and the state to which all symbols from first to last lead."""


class Nfa:
    """A nondeterministic automaton of a syntax tree: state 0 is the start, state 1 the end.

    Its symbols are bytes, and from 256 on calls of rules.

    Args:
        node: the syntax tree to translate.
        rules: the number of each rule by its name. A call of any other rule gets no edge.

    edges: of each state, its edges: (first symbol, last symbol, state to which each of these symbols
        leads).
    free: of each state, the states that are reached from it without reading anything.
    """

    def __init__(self, node: Node, rules: dict[str, int] | None = None) -> None:
        self.edges: list[list[Edge]] = [[], []]
        self.free: list[list[int]] = [[], []]
        self.rules = rules or {}
        self.join(node, 0, 1)

    def state(self) -> int:
        """Add a state and return its number. Raises `UserError` if there are too many."""
        if len(self.edges) % 1000 == 0:
            check()
        if len(self.edges) >= MOST_STATES:
            raise UserError(
                f"a grammar takes more than {MOST_STATES} states: lower its counts or lengths"
            )
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def append(self, node: Node, begin: int) -> int:
        """Add a new state, reached from state `begin` by the texts that match `node`; return its number."""
        end = self.state()
        self.join(node, begin, end)
        return end

    def join(self, node: Node, begin: int, end: int) -> None:
        """Add edges and states, so that exactly the texts that match `node` lead from `begin` to `end`."""
        if isinstance(node, Chars):
            sequences = quoted_bytes(node.ranges) if node.quoted else utf8(node.ranges)
            for sequence in sequences:
                self.read(sequence, begin, end)
        elif isinstance(node, Cat):
            for part in node.parts[:-1]:
                begin = self.append(part, begin)
            if node.parts:
                self.join(node.parts[-1], begin, end)
            else:
                self.free[begin].append(end)
        elif isinstance(node, Alt):
            for part in node.parts:
                self.join(part, begin, end)
        elif isinstance(node, Repeat):
            self.repeat(node, begin, end)
        elif isinstance(node, Members):
            self.members(node, begin, end)
        elif node.rule in self.rules:
            symbol = CALLS + self.rules[node.rule]
            self.edges[begin].append((symbol, symbol, end))

    def read(self, sequence: list[tuple[int, int]], begin: int, end: int) -> None:
        """Add a path of new states from `begin` to `end` that reads a byte of each range of `sequence`.

        sequence: (low, high) ranges of bytes, both ends included.
        """
        for low, high in sequence[:-1]:
            state = self.state()
            self.edges[begin].append((low, high, state))
            begin = state
        self.edges[begin].append((*sequence[-1], end))

    def repeat(self, node: Repeat, begin: int, end: int) -> None:
        """Add edges and states for a repetition from state `begin` to state `end`.

        They are `node.low` copies of `node.part`, one after the other, and then copies that may be left
        out, up to `node.high` copies in all. If `node.high` is None, a loop replaces those that may be left
        out. It goes through a new state, which nothing else uses.
        """
        for _ in range(node.low):
            begin = self.append(node.part, begin)
        if node.high is None:
            loop = self.state()
            self.free[begin].append(loop)
            self.join(node.part, loop, loop)
            self.free[loop].append(end)
            return
        self.free[begin].append(end)
        for _ in range(node.high - node.low):
            begin = self.append(node.part, begin)
            self.free[begin].append(end)

    def members(self, node: Members, begin: int, end: int) -> None:
        """Add edges and states for the members of a JSON object from state `begin` to state `end`.

        Before each member there are two states: in `nothing` no member was written yet; in `something` at
        least one member was, so that a comma comes first.
        """
        nothing, something = begin, self.state()
        for member, required in node.members:
            inside = self.state()
            self.free[nothing].append(inside)
            self.join(node.comma, something, inside)
            after = self.append(member, inside)
            if required:
                nothing = self.state()  # no edge leads here
            else:
                self.free[something].append(after)
            something = after
        if node.more is not None:
            inside = self.state()
            self.free[nothing].append(inside)
            self.join(node.comma, something, inside)
            self.join(node.more, inside, something)
        self.free[nothing].append(end)
        self.free[something].append(end)


# Characters as bytes.


def utf8(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of byte ranges (low, high) that match the UTF-8 forms of all code points in `ranges`.

    Each form is matched by one sequence only. Surrogates have no form.
    """
    todo = list(ranges)
    while todo:
        low, high = todo.pop()
        last = last_of_block(low, high)
        if last is not None:
            todo += [(low, last), (last + 1, high)]
        elif not 0xD800 <= low <= 0xDFFF:
            yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


def last_of_block(low: int, high: int) -> int | None:
    """Return the code point after which a range must be split, so that byte ranges can match its first part.

    low, high: the first and last code point of the range.

    Returns:
        None if no split is needed: all code points of the range have UTF-8 forms of equal length, and each
        byte takes all values between that of the first form and that of the last.
    """
    for last in (0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF):
        if low <= last < high:
            return last
    for bits in (6, 12, 18) if low > 0x7F else ():
        rest = (1 << bits) - 1  # what the bytes behind the first ones hold
        if low >> bits != high >> bits and low & rest:
            return low | rest
        if low >> bits != high >> bits and high & rest != rest:
            return (high & ~rest) - 1
    return None


ESCAPES = {code: b"\\u%04x" % code for code in range(0x20)}
ESCAPES |= {8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}
"""Code points that a JSON string cannot hold as they are, and how it writes them."""


def quoted_bytes(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of byte ranges (low, high) for each code point in `ranges` inside a JSON string.

    Quotes, backslashes and control characters are matched as escapes.
    """
    for code, text in ESCAPES.items():
        if any(low <= code <= high for low, high in ranges):
            yield [(byte, byte) for byte in text]
    escaped = ((code, code) for code in ESCAPES)
    yield from utf8(complement((*complement(ranges), *escaped)))
