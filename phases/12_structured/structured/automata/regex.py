r"""Parse regular expressions by recursive descent: a pattern becomes a `Node`.

A pattern may hold characters, `.`, classes `[a-z]` and `[^...]`, `\d \w \s` and their opposites, escapes,
groups, `|`, and `* + ? {m,n}`. Backreferences and lookaround are refused, for no finite automaton can follow
them. `^` and `$` may stand at the ends only. A class holds characters, ranges and escapes, and nothing else:
`[`, `&&` and `--` have no meaning of their own there. Patterns mean what Python's `re` says with `re.ASCII`.
"""

from __future__ import annotations

import re

from common.errors import UserError
from structured.automata.nodes import (
    LAST,
    Alt,
    Cat,
    Chars,
    Node,
    Ranges,
    Repeat,
    complement,
    just,
)

CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "s": ((9, 13), (32, 32)),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
CONTROLS = dict(zip("ntrfv0", "\n\t\r\f\v\0", strict=True))
HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,8})\}")
COUNT = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(pattern: str) -> Node:
    """Parse a regular expression that must match a whole text; return its syntax tree.

    Classes such as `\\d` are ASCII.

    Raises:
        UserError: the pattern is wrong, or no finite automaton can follow it. The error names the index of
            the character.
    """
    return PatternReader(pattern, "regex").whole()


class PatternReader:
    r"""Parses a regular expression; each method parses one piece and moves `at` to the character after it.

    at: the index of the next character. where: what an error calls the pattern, such as "regex".
    classes: the characters of each escape such as `\d`, by its letter; `\D` matches all others.
    line_ends: the characters that `.` does not match.
    """

    classes = CLASSES
    line_ends = just("\n")

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern = pattern
        self.where = where
        self.at = 0

    def refuse(self, what: str) -> UserError:
        """Return a `UserError` with the pattern, the index of the next character, and the fault `what`."""
        return UserError(f"{self.where} {self.pattern[:60]!r}, character {self.at}: {what}")

    def peek(self) -> str:
        """Return the next character, or an empty text at the end of the pattern."""
        return self.pattern[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        """Move past `text` and return True if it comes next in the pattern; else return False."""
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def whole(self) -> Node:
        """Parse the whole pattern; return its syntax tree. `^` and `$` may enclose outermost alternatives."""
        parts = list[Node]()
        while not parts or self.take("|"):
            self.take("^")
            parts.append(self.sequence())
            self.take("$")
        if self.at < len(self.pattern):
            raise self.refuse(f"{self.peek()!r} is out of place")
        return Alt(tuple(parts))

    def alternatives(self) -> Node:
        """Parse alternatives, separated by `|`; return a syntax tree that matches any of them."""
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return Alt(tuple(parts))

    def sequence(self) -> Node:
        """Parse pieces up to `|`, `)`, `$` or the end; return a syntax tree that matches them in order."""
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")", "$"):
            parts.append(self.repeated())
        return Cat(tuple(parts))

    def repeated(self) -> Node:
        """Parse one piece and the repetition after it, if there is one; return their syntax tree."""
        node = self.one()
        if (char := self.peek()) in ("*", "+", "?", "{"):
            low, high = self.counts() if char == "{" else COUNTS[char]
            self.at += char != "{"
            self.take("?")  # lazy or not, the language is the same
            node = Repeat(node, low, high)
        return node

    def counts(self) -> tuple[int, int | None]:
        """Parse `{m}`, `{m,}` or `{m,n}`; return the least and the most repetitions (None: no limit)."""
        found = COUNT.match(self.pattern, self.at)
        if not found:
            raise self.refuse(
                "'{' must begin a count such as {2,5}; write \\{ for the character"
            )
        low, comma, high = found.groups()
        least, most = int(low), int(high) if high else None if comma else int(low)
        if most is not None and most < least:
            raise self.refuse(f"{found[0]} must count up")
        self.at = found.end()
        return least, most

    def one(self) -> Node:
        """Parse one character, class or group; return its syntax tree."""
        char = self.peek()
        if self.take("("):
            return self.group()
        if self.take("["):
            ranges = self.char_class()
        elif self.take("."):
            ranges = complement(self.line_ends)
        elif self.take("\\"):
            ranges = self.escape()
        elif char in "*+?{^":
            raise self.refuse(f"{char!r} is out of place")
        else:
            self.at += 1
            ranges = just(char)
        return Chars(ranges)

    def group(self) -> Node:
        """Parse a group, from the character after its `(` to its `)`; return its syntax tree."""
        if self.take("?") and not self.take(":"):
            raise self.refuse(
                "a group must begin with '?:' or no '?', for nothing can look around"
            )
        node = self.alternatives()
        if not self.take(")"):
            raise self.refuse("a group is not closed: ')' must come here")
        return node

    def escape(self) -> Ranges:
        """Parse an escape, from the character after its backslash on; return the code points it matches."""
        if found := HEX.match(self.pattern, self.at):
            self.at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                raise self.refuse(f"\\{found[0]} is no character")
            return just(chr(code))
        char = self.peek()
        self.at += 1
        if char in CONTROLS and not (char == "0" and self.peek().isdigit()):
            return just(CONTROLS[char])
        if (known := self.classes.get(char.lower())) is not None:
            return complement(known) if char.isupper() else known
        if not char or (char.isascii() and char.isalnum()):
            raise self.refuse(f"\\{char} is not known")
        return just(char)

    def char_class(self) -> Ranges:
        """Parse a class, from the character after its `[` to its `]`; return the code points it matches."""
        negated, found = self.take("^"), list[tuple[int, int]]()
        if self.peek() == "]":
            raise self.refuse("a class is empty; write \\] for the character")
        while not self.take("]"):
            found += self.class_part()
        return complement(tuple(found)) if negated else tuple(found)

    def class_part(self) -> Ranges:
        """Parse a character, an escape or a range of a class; return the code points it matches.

        Beside an escape of several characters, `-` stands for itself: `[\\w-.]`.
        """
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
        """Parse one character or escape of a class; return the code points that it matches."""
        char = self.peek()
        if not char:
            raise self.refuse("a class is not closed")
        if self.take("\\"):
            return self.escape()
        self.at += 1
        return just(char)
