r"""Regular expressions, read by recursive descent: a pattern becomes a `Node`.

What a pattern may hold: characters, `.`, classes `[a-z]` and `[^...]`, `\d \w \s` and their opposites,
escapes, groups, `|`, `* + ? {m,n}`. What is no regular language (backreferences), or needs to look around, is
refused. `^` and `$` stand at the ends only. A class holds characters, ranges and escapes, and nothing else:
`[`, `&&` and `--` have no meaning of their own there. What `\s` and `.` mean is said by a `Dialect`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Dialect:
    r"""The meaning of what stands for several characters.

    spaces: `\s`. line_ends: what `.` leaves out. controls: escapes of a letter.
    """

    spaces: Ranges
    line_ends: Ranges
    controls: dict[str, int]

    def escaped(self, letter: str) -> Ranges | None:
        r"""Return the characters of an escape such as `\d` or `\n`; None: there is no such escape."""
        if letter in self.controls:
            return ((self.controls[letter], self.controls[letter]),)
        found = self.spaces if letter.lower() == "s" else CLASSES.get(letter.lower())
        return complement(found) if found is not None and letter.isupper() else found


CLASSES: dict[str, Ranges] = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122))}
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}
ASCII = Dialect(((9, 13), (32, 32)), ((10, 10),), CONTROLS | {"a": 7})
"""Of `regex`: Python's with `re.ASCII`."""
ECMASCRIPT = Dialect(
    (
        *(
            (9, 13),
            (32, 32),
            (0xA0, 0xA0),
            (0x1680, 0x1680),
            (0x2000, 0x200A),
            (0x2028, 0x2029),
        ),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ),
    ((10, 10), (13, 13), (0x2028, 0x2029)),
    CONTROLS,
)
"""Of JSON schemas: https://json-schema.org/draft/2020-12, with the flag `u`."""
_PAIR = r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
HEX = re.compile(
    rf"x([0-9a-fA-F]{{2}})|{_PAIR}|u([0-9a-fA-F]{{4}})|u\{{([0-9a-fA-F]{{1,8}})\}}"
)
COUNT = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(pattern: str, where: str = "regex") -> Node:
    """Read a pattern that matches as a whole, in the dialect `ASCII`.

    Raises:
        UserError: it is wrong, or says what no finite automaton can. It names the place.
    """
    return Alt(tuple(node for _, node, _ in PatternReader(pattern, where, ASCII).branches()))


def parse_search(pattern: str, where: str) -> Node:
    """Read the texts in which a pattern is found, as JSON schemas mean it; `^` and `$` pin the ends."""
    anything, parts = Repeat(Chars(((0, LAST),))), list[Node]()
    for begins, node, ends in PatternReader(pattern, where, ECMASCRIPT).branches():
        parts.append(
            Cat(((EMPTY if begins else anything), node, (EMPTY if ends else anything)))
        )
    return Alt(tuple(parts))


class PatternReader:
    """A place in a pattern. Each method reads one kind of thing there."""

    def __init__(self, pattern: str, where: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.where = where
        self.dialect = dialect
        self.at = 0

    def refuse(self, what: str) -> UserError:
        """Return an error that names the place."""
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
        """Read parts between `|`."""
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return Alt(tuple(parts))

    def sequence(self) -> Node:
        """Read what stands one after the other, up to `|`, `)` or `$`."""
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")", "$"):
            parts.append(self.repeated())
        return Cat(tuple(parts))

    def repeated(self) -> Node:
        """Read one part, and how often it comes."""
        node = self.one()
        if (char := self.peek()) in ("*", "+", "?", "{"):
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
            return Chars(complement(self.dialect.line_ends))
        if self.take("\\"):
            return Chars(self.escape())
        if char in "*+?{^":
            raise self.refuse(f"{char!r} is out of place")
        self.at += 1
        return Chars(((ord(char), ord(char)),))

    def group(self) -> Node:
        """Read what is behind `(`, up to `)`."""
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
            code = int(found[1] or found[4] or found[5] or "0", 16)
            if found[2]:  # the two halves of a pair
                code = (
                    0x10000 + (int(found[2], 16) - 0xD800) * 0x400 + int(found[3], 16) - 0xDC00
                )
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                raise self.refuse(f"\\{found[0]} is no character")
            return ((code, code),)
        char = self.peek()
        self.at += 1
        ranges = self.dialect.escaped(char)
        if char == "0" and self.peek().isdigit():
            ranges = None
        if ranges is not None:
            return ranges
        if not char or (char.isascii() and char.isalnum()):
            raise self.refuse(f"\\{char} is not known")
        return ((ord(char), ord(char)),)

    def char_class(self) -> Ranges:
        """Read what is behind `[`, up to `]`."""
        negated, found = self.take("^"), list[tuple[int, int]]()
        if self.peek() == "]" and self.dialect is not ECMASCRIPT:
            raise self.refuse("a class is empty; write \\] for the character")
        while not self.take("]"):
            found += self.class_part()
        return complement(tuple(found)) if negated else tuple(found)

    def class_part(self) -> Ranges:
        """Read a character, an escape or a range; beside an escape of several characters `-` is itself."""
        low = self.class_item()
        if self.peek() != "-" or self.pattern[self.at + 1 : self.at + 2] in ("]", ""):
            return low
        self.at += 1
        high = self.class_item()
        if any(len(part) > 1 or part[0][0] < part[0][1] for part in (low, high)):
            return (*low, (45, 45), *high)
        if low[0][0] > high[0][0]:
            raise self.refuse("a range must go from a character to a later one")
        return ((low[0][0], high[0][0]),)

    def class_item(self) -> Ranges:
        """Read a character or an escape inside a class."""
        if not self.peek():
            raise self.refuse("a class is not closed")
        if self.take("\\"):
            return ((8, 8),) if self.take("b") else self.escape()
        self.at += 1
        return ((ord(self.pattern[self.at - 1]), ord(self.pattern[self.at - 1])),)
