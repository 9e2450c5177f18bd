"""From an expression to a nondeterministic automaton over bytes (Thompson, CACM 1968)."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import UserError
from structured.automata.deadline import check
from structured.automata.nodes import Alt, Cat, Chars, Members, Node, Ranges, Repeat

MOST_STATES = 60_000
CALLS = 256
"""Symbols from here on are calls of rules; those below are bytes."""

Edge = tuple[int, int, int]
"""From the first symbol to the last, and to which state."""


class Nfa:
    """States with edges for ranges of symbols and free edges; state 0 begins and state 1 accepts.

    Args:
        rules: the number of each rule that may be called.
    """

    def __init__(self, node: Node, rules: dict[str, int] | None = None) -> None:
        self.edges: list[list[Edge]] = [[], []]
        self.free: list[list[int]] = [[], []]
        self.rules = rules or {}
        self.join(node, 0, 1)

    def state(self) -> int:
        """Make a state. Raises `UserError` when there are too many."""
        if len(self.edges) % 1000 == 0:
            check()
        if len(self.edges) >= MOST_STATES:
            raise UserError(
                f"a grammar takes more than {MOST_STATES} states: lower its counts or lengths"
            )
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def join(self, node: Node, begin: int, end: int) -> None:
        """Let exactly the texts of `node` lead from `begin` to `end`."""
        if isinstance(node, Chars):
            sequences = quoted_bytes(node.ranges) if node.quoted else utf8(node.ranges)
            for sequence in sequences:
                self.follow(sequence, begin, end)
        elif isinstance(node, Cat):
            for part in node.parts[:-1]:
                begin, before = self.state(), begin
                self.join(part, before, begin)
            if node.parts:
                self.join(node.parts[-1], begin, end)
            else:
                self.free[begin].append(end)
        elif isinstance(node, Alt):
            for part in node.parts:
                # A branch of its own: what loops in one must not be entered from another.
                inside, outside = self.state(), self.state()
                self.free[begin].append(inside)
                self.join(part, inside, outside)
                self.free[outside].append(end)
        elif isinstance(node, Repeat):
            self.repeat(node, begin, end)
        elif isinstance(node, Members):
            self.members(node, begin, end)
        else:
            symbol = CALLS + self.rules[node.rule]
            self.edges[begin].append((symbol, symbol, end))

    def follow(self, sequence: list[tuple[int, int]], begin: int, end: int) -> None:
        """Read one byte of each range, in order."""
        for low, high in sequence[:-1]:
            begin, before = self.state(), begin
            self.edges[before].append((low, high, begin))
        self.edges[begin].append((*sequence[-1], end))

    def repeat(self, node: Repeat, begin: int, end: int) -> None:
        """Make the copies that must be there, then those that may be, or a loop."""
        for _ in range(node.low):
            begin, before = self.state(), begin
            self.join(node.part, before, begin)
        if node.high is None:
            loop = self.state()
            self.free[begin].append(loop)
            self.join(node.part, loop, loop)
            self.free[loop].append(end)
            return
        self.free[begin].append(end)
        for _ in range(node.high - node.low):
            begin, before = self.state(), begin
            self.join(node.part, before, begin)
            self.free[begin].append(end)

    def members(self, node: Members, begin: int, end: int) -> None:
        """Keep two states before each member: nothing is written yet, or something is, so a comma comes."""
        nothing, something = begin, self.state()
        for member, required in node.members:
            inside, after = self.state(), self.state()
            self.free[nothing].append(inside)
            self.join(node.comma, something, inside)
            self.join(member, inside, after)
            if required:
                nothing = self.state()  # where nothing leads
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

LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
"""Code points whose UTF-8 forms are equally long; halves of surrogate pairs have none."""


def utf8(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of byte ranges whose products are the UTF-8 forms of the code points, each once."""
    for low, high in ranges:
        for least, most in LENGTHS:
            if max(low, least) <= min(high, most):
                yield from _split(chr(max(low, least)).encode(), chr(min(high, most)).encode())


def _split(low: bytes, high: bytes) -> Iterator[list[tuple[int, int]]]:
    """Yield all forms from `low` to `high`, which are equally long, as few products of ranges as it takes."""
    if len(low) == 1:
        yield [(low[0], high[0])]
        return
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    if low[0] == high[0]:
        for rest in _split(low[1:], high[1:]):
            yield [(low[0], low[0]), *rest]
        return
    first, last = low[0], high[0]
    if low[1:] != least:
        yield from ([(first, first), *rest] for rest in _split(low[1:], most))
        first += 1
    if high[1:] != most:
        yield from ([(last, last), *rest] for rest in _split(least, high[1:]))
        last -= 1
    if first <= last:
        yield [(first, last), *([(0x80, 0xBF)] * (len(low) - 1))]


ESCAPES = {
    '"': b'\\"',
    "\\": b"\\\\",
    "\b": b"\\b",
    "\f": b"\\f",
    "\n": b"\\n",
    "\r": b"\\r",
    "\t": b"\\t",
}
"""Characters that a JSON string cannot hold as they are; other controls are written as \\u00xx."""


def quoted_bytes(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield the same of characters in a JSON string."""
    plain: list[tuple[int, int]] = []
    for low, high in ranges:
        for left, right in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)):
            if max(low, left) <= min(high, right):
                plain.append((max(low, left), min(high, right)))
        for code in [
            *range(low, min(high, 0x1F) + 1),
            *(c for c in (0x22, 0x5C) if low <= c <= high),
        ]:
            yield [(byte, byte) for byte in ESCAPES.get(chr(code)) or b"\\u%04x" % code]
    yield from utf8(tuple(plain))
