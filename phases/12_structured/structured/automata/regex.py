r"""Regular expressions, read by recursive descent: a pattern becomes a `Node`.

What a pattern may hold: characters, `.`, classes `[a-z]` and `[^...]`, `\d \w \s` and their opposites (of
ASCII), escapes, groups, `|`, `* + ? {m,n}`. What is no regular language (backreferences), or needs to look
around, is refused. `^` and `$` stand at the ends only.
"""

from __future__ import annotations

import re

from common.errors import UserError
from structured.automata.nodes import (
    EMPTY,
    LAST,
    Alt,
    Cat,
    Chars,
    Node,
    Ranges,
    Repeat,
    complement,
)

MOST_REPEATS = 1000

CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
CLASSES |= {name.upper(): complement(ranges) for name, ranges in CLASSES.items()}
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0, "a": 7}
HEX, COUNT = (
    re.compile("x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"),
    re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}"),
)
COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
DOT = complement(((10, 10),))


def parse(pattern: str, where: str = "regex") -> Node:
    """Read a pattern that matches as a whole.

    Raises:
        UserError: it is wrong, or says what no finite automaton can. It names the place.
    """
    return Alt(tuple(node for _, node, _ in _PatternReader(pattern, where).branches()))


def parse_search(pattern: str, where: str) -> Node:
    """Read the texts in which a pattern is found, as JSON schemas mean it; `^` and `$` pin the ends."""
    anything, parts = Repeat(Chars(((0, LAST),))), list[Node]()
    for begins, node, ends in _PatternReader(pattern, where).branches():
        parts.append(
            Cat(((EMPTY if begins else anything), node, (EMPTY if ends else anything)))
        )
    return Alt(tuple(parts))


class _PatternReader:
    """A place in a pattern. Each method reads one kind of thing there."""

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern = pattern
        self.where = where
        self.at = 0

    def refuse(self, what: str) -> UserError:
        return UserError(f"{self.where} {self.pattern[:60]!r}, character {self.at}: {what}")

    def peek(self) -> str:
        """Return the next character; empty at the end."""
        return self.pattern[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        """Step over `text` if it comes next."""
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def branches(self) -> list[tuple[bool, Node, bool]]:
        """Read the outermost alternatives, and whether each has `^` before it and `$` behind."""
        found = list[tuple[bool, Node, bool]]()
        while not found or self.take("|"):
            begins = self.take("^")
            node = self.sequence()
            found.append((begins, node, self.take("$")))
        if self.at < len(self.pattern):
            raise self.refuse(f"{self.peek()!r} is out of place")
        return found

    def alternatives(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return Alt(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")", "$"):
            parts.append(self.repeated())
        return Cat(tuple(parts))

    def repeated(self) -> Node:
        node = self.one()
        while (char := self.peek()) in ("*", "+", "?", "{"):
            low, high = self.counts() if char == "{" else COUNTS[char]
            self.at += char != "{"
            self.take("?")  # lazy or not, the language is the same
            node = Repeat(node, low, high)
        return node

    def counts(self) -> tuple[int, int | None]:
        """Read `{m}`, `{m,}` or `{m,n}`."""
        found = COUNT.match(self.pattern, self.at)
        if not found:
            raise self.refuse(
                "'{' must begin a count such as {2,5}; write \\{ for the character"
            )
        low, comma, high = found.groups()
        least, most = int(low), int(high) if high else None if comma else int(low)
        if not least <= (least if most is None else most) <= MOST_REPEATS:
            raise self.refuse(f"{found[0]} must count up, to {MOST_REPEATS} at most")
        self.at = found.end()
        return least, most

    def one(self) -> Node:
        """Read one character, class or group."""
        char = self.peek()
        if self.take("("):
            return self.group()
        if self.take("["):
            return Chars(self.char_class())
        if self.take("."):
            return Chars(DOT)
        if self.take("\\"):
            return Chars(self.escape())
        if char in "*+?{^":
            raise self.refuse(f"{char!r} is out of place")
        self.at += 1
        return Chars(((ord(char), ord(char)),))

    def group(self) -> Node:
        if self.take("?") and not self.take(":"):
            raise self.refuse(
                "a group must begin with '?:' or no '?', for nothing can look around"
            )
        node = self.alternatives()
        if not self.take(")"):
            raise self.refuse(
                f"{self.peek()!r} is out of place" if self.peek() else "a group is not closed"
            )
        return node

    def escape(self) -> Ranges:
        """Read what stands behind a backslash."""
        if found := HEX.match(self.pattern, self.at):
            self.at = found.end()
            code = int(found[1] or found[2], 16)
            return ((code, code),)
        char = self.peek()
        self.at += 1
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            return ((CONTROLS[char], CONTROLS[char]),)
        if not char or (char.isascii() and char.isalnum()):
            raise self.refuse(f"\\{char} is not known")
        return ((ord(char), ord(char)),)

    def char_class(self) -> Ranges:
        """Read what is behind `[`, up to `]`."""
        negated, found = self.take("^"), list[tuple[int, int]]()
        if self.peek() == "]":
            raise self.refuse("a class is empty; write \\] for the character")
        while self.peek() != "]":
            if not self.peek():
                raise self.refuse("a class is not closed")
            low = self.class_item()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.class_item()
                if len(low) > 1 or len(high) > 1 or low[0][0] > high[0][1]:
                    raise self.refuse("a range must go from a character to a later one")
                found.append((low[0][0], high[0][1]))
            else:
                found += low
        self.at += 1
        return complement(tuple(found)) if negated else tuple(found)

    def class_item(self) -> Ranges:
        if self.take("\\"):
            return ((8, 8),) if self.take("b") else self.escape()
        self.at += 1
        return ((ord(self.pattern[self.at - 1]), ord(self.pattern[self.at - 1])),)
