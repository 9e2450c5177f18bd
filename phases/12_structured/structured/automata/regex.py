r"""Regular expressions, read by recursive descent: a pattern becomes a `Node`.

What a pattern may hold: characters, `.`, classes `[a-z]` and `[^...]`, `\d \w \s` and their opposites (of
ASCII), escapes, groups, `|`, `* + ? {m,n}`. What is no regular language (backreferences), or needs to look
around, is refused. `^` and `$` stand at the ends only.
"""

from __future__ import annotations

from common.errors import UserError
from structured.automata.nodes import EMPTY, LAST, Alt, Cat, Chars, Node, Ranges, Repeat, complement, union

MOST_REPEATS = 1000
MOST_DEPTH = 64
"""Of nested groups: reading them recurses."""

CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
CLASSES |= {name.upper(): complement(ranges) for name, ranges in CLASSES.items()}
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0, "a": 7}
HEX = {"x": 2, "u": 4}
DOT = complement(((10, 10),))


def parse(pattern: str, where: str = "regex") -> Node:
    """The language of a pattern that matches as a whole.

    Raises:
        UserError: it is wrong, or says what no finite automaton can. It names the place.
    """
    return _Reader(pattern, where).whole()


def parse_search(pattern: str, where: str) -> Node:
    """Texts in which a pattern is found, as JSON schemas mean it; `^` and `$` pin the ends."""
    anything = Repeat(Chars(((0, LAST),)))
    reader = _Reader(pattern, where)
    parts = []
    for begins, node, ends in reader.branches():
        parts.append(Cat(((EMPTY if begins else anything), node, (EMPTY if ends else anything))))
    return Alt(tuple(parts))


class _Reader:
    """A place in a pattern. Each method reads one kind of thing there."""

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern, self.where, self.at, self.depth = pattern, where, 0, 0

    def refuse(self, what: str) -> UserError:
        return UserError(f"{self.where} {self.pattern[:60]!r}, character {self.at}: {what}")

    def peek(self) -> str:
        """The next character; empty at the end."""
        return self.pattern[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        """Step over `text` if it comes next."""
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def whole(self) -> Node:
        return Alt(tuple(node for _, node, _ in self.branches()))

    def branches(self) -> list[tuple[bool, Node, bool]]:
        """The outermost alternatives, and whether each has `^` before it and `$` behind."""
        found = []
        while True:
            begins = self.take("^")
            node = self.sequence()
            found.append((begins, node, self.take("$")))
            if not self.take("|"):
                break
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
        while True:
            if self.take("*"):
                low, high = 0, None
            elif self.take("+"):
                low, high = 1, None
            elif self.take("?"):
                low, high = 0, 1
            elif self.peek() == "{":
                low, high = self.counts()
            else:
                return node
            self.take("?")  # lazy or not, the language is the same
            node = Repeat(node, low, high)

    def counts(self) -> tuple[int, int | None]:
        """`{m}`, `{m,}` or `{m,n}`."""
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(end, self.at)].partition(",")
        if (
            end < 0
            or not low.isascii()
            or not low.isdigit()
            or (high and not (high.isascii() and high.isdigit()))
        ):
            raise self.refuse("'{' must begin a count such as {2,5}; write \\{ for the character")
        least, most = int(low[:9]), int(high[:9]) if high else (None if comma else int(low[:9]))
        if max(least, most or 0) > MOST_REPEATS:
            raise self.refuse(
                f"something repeats {max(least, most or 0)} times, but may {MOST_REPEATS} times"
            )
        if most is not None and most < least:
            raise self.refuse(f"a count of {least} to {most} is empty")
        self.at = end + 1
        return least, most

    def one(self) -> Node:
        """One character, class or group."""
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
                "a group that begins with '?' must begin with '?:', for nothing can look around"
            )
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.refuse(f"groups nest deeper than {MOST_DEPTH}")
        node = self.alternatives()
        if not self.take(")"):
            raise self.refuse(
                "a group is not closed" if not self.peek() else f"{self.peek()!r} is out of place"
            )
        self.depth -= 1
        return node

    def escape(self) -> Ranges:
        """What stands behind a backslash."""
        char = self.peek()
        self.at += 1
        if char in CLASSES:
            return CLASSES[char]
        if char in HEX:
            digits = self.pattern[self.at : self.at + HEX[char]]
            try:
                code = int(digits, 16) if len(digits) == HEX[char] else -1
            except ValueError:
                code = -1
            if code < 0:
                raise self.refuse(f"\\{char} must be followed by {HEX[char]} hexadecimal digits")
            self.at += HEX[char]
            return ((code, code),)
        if char in CONTROLS:
            return ((CONTROLS[char], CONTROLS[char]),)
        if not char or (char.isascii() and char.isalnum()):
            raise self.refuse(f"\\{char} is not known")
        return ((ord(char), ord(char)),)

    def char_class(self) -> Ranges:
        """Behind `[`, up to `]`."""
        negated, found = self.take("^"), list[tuple[int, int]]()
        first = True
        while first or self.peek() != "]":
            if not self.peek():
                raise self.refuse("a class is not closed")
            if first and self.peek() == "]":
                raise self.refuse("a class is empty; write \\] for the character")
            first = False
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
        ranges = union(found)
        return complement(ranges) if negated else ranges

    def class_item(self) -> Ranges:
        if self.take("\\"):
            return ((8, 8),) if self.take("b") else self.escape()
        self.at += 1
        return ((ord(self.pattern[self.at - 1]), ord(self.pattern[self.at - 1])),)
