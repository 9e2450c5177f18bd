r"""Patterns in the notation of Rust's regex crate, which llguidance reads, with the meaning they have here.

The crate reads some otherwise: its `\d`, `\w` and `\s` are of Unicode, `.` is all but a line feed, and a
class may hold other classes, `[:alpha:]`, and operators such as `&&` and `--`. So characters and classes are
spelled out as the reader of phase 12's automata understands them: a pattern has one meaning in both backends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from phases.appendix.guidance.spelling import Spelling
from structured.automata.nodes import Ranges, complement, just
from structured.automata.regex import CLASSES, COUNT, PatternReader

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON escapes by number, or that the library does not write: it would leave them out."""
_PAIR = re.compile(r"u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)|\?([is]*)(?:-([is]+))?([:)])")
_PROPERTY = re.compile(r"[pP]\{[\w=]+\}")
_LARK = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"'  # comments and strings stay as they are
    r"|/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)|%json\s*(?P<schema>)|<(?P<token>[^<>\s]+)>",
    re.DOTALL,
)


class EcmaScriptReader(PatternReader):
    """Reads a JSON schema's `pattern`: ECMAScript's regular expressions with the flag `u`."""

    classes = CLASSES | {
        "s": (
            (9, 13),
            *just(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"),
            (0x2000, 0x200A),
        ),
    }
    line_ends = just("\n\r\u2028\u2029")

    def escape(self) -> Ranges:
        """Parse an escape, or two that are a surrogate pair; return ranges of matching code points."""
        found = _PAIR.match(self.pattern, self.at)
        if found is None:
            return super().escape()
        self.at = found.end()
        high, low = int(found[1], 16) - 0xD800, int(found[2], 16) - 0xDC00
        return just(chr(0x10000 + high * 0x400 + low))


def rewrite_pattern(pattern: str, where: str) -> str:
    """Return a JSON schema's `pattern` (ECMAScript's dialect) in the notation of llguidance.

    A pattern that this function has returned is returned unchanged. where: JSON pointer of the pattern, for
    errors.

    Raises:
        ValueError: no grammar can follow it, or it names a control character, which is never written.
    """
    return _Rewriter(EcmaScriptReader(pattern, where)).rewritten()


def rewrite_regex(pattern: str, flags: str = "") -> str:
    """Return a Python regular expression (of `re` with `re.ASCII`) in the notation of llguidance.

    flags: the letters after the expression in a Lark grammar, such as "i".

    Raises:
        ValueError: no grammar can follow it.
    """
    if "x" in flags:
        raise ValueError(f"regex {pattern[:60]!r}: the flag x is not known here")
    found = _Rewriter(PatternReader(pattern, "regex"), every="s" in flags).rewritten()
    return f"(?i:{found})" if "i" in flags else found


def rewrite_lark(
    source: str, schema: Callable[[str], str], known: Spelling
) -> tuple[str, set[int]]:
    """Return a Lark grammar with regular expressions and JSON schemas rewritten, and its added tokens.

    An added token is one that is text elsewhere, such as Qwen's `<think>`.

    Args:
        source: the grammar.
        schema: rewrites the text of a JSON schema.
        known: the tokens that a grammar may ask for, `<name>`.

    Returns:
        the grammar's new text, and the ids of those of `known.added` that it asks for.

    Raises:
        ValueError: no grammar can follow it.
    """
    parts, asked = list[str](), set[int]()
    at = 0
    while found := _LARK.search(source, at):
        parts.append(source[at : found.start()])
        at, part = found.end(), found[0]
        if found["regex"] is not None:
            part = f"/{rewrite_regex(found['regex'], found['flags']) or '(?:)'}/"
        elif found["schema"] is not None:
            begin = at
            try:
                at = json.JSONDecoder().raw_decode(source, begin)[1]
                part += schema(source[begin:at])
            except json.JSONDecodeError:
                at = begin  # the library says what is wrong
        elif name := found["token"]:
            asked |= _added(name, known)
        parts.append(part)
    return "".join((*parts, source[at:])), asked


def _added(name: str, known: Spelling) -> set[int]:
    """Return {token id} if `<name>` in a Lark grammar means an added token, else an empty set.

    name: what stands between `<` and `>`: a name, or an id in brackets such as `[151668]`. known: the tokens
        that a grammar may ask for.

    Raises:
        ValueError: the id is of no special or added token.
    """
    if not name.startswith("["):
        return {known.added[f"<{name}>"]} if f"<{name}>" in known.added else set()
    token = int(name[1:-1]) if re.fullmatch(r"\[[0-9]{1,9}\]", name) else -1
    if token not in known.special and token not in known.added.values():
        raise ValueError(f"<{name}> must be the number of one special or added token")
    return {token} - known.special.keys()


class _Rewriter:
    """Reads a regular expression piece by piece, and writes it in the notation of llguidance.

    reader: parses the expression's characters, classes and escapes.
    every: of each open group, whether `.` also matches line ends.
    repeatable: whether the piece read last may be repeated.
    """

    def __init__(self, reader: PatternReader, *, every: bool = False) -> None:
        self.reader, self.every = reader, [every]
        self.ecmascript = isinstance(reader, EcmaScriptReader)
        self.repeatable = False

    def rewritten(self) -> str:
        """Return the whole expression in llguidance's notation (Rust's regex crate), its meaning unchanged.

        There, escapes and classes written as before could match other characters.

        Raises:
            ValueError: no grammar can follow a part of it.
        """
        parts = list[str]()
        while self.reader.peek():
            parts.append(self.next())
        if len(self.every) > 1:
            raise self.reader.refuse("a group is not closed")
        return "".join(parts)

    def next(self) -> str:
        """Read the next piece (a character, class, escape or sign); return it as llguidance writes it."""
        reader = self.reader
        char = reader.peek()
        if char in "*+?{":
            return self.repetition()
        reader.at += 1
        self.repeatable = char not in "|(^$"
        if char in "|^$":
            return char
        if char == "(":
            return self.group()
        if char == ")":
            if len(self.every) == 1:
                raise reader.refuse("')' is out of place")
            self.every.pop()
            return char
        if char == "[":
            return self.char_class()
        if char == ".":
            return spelled(complement(() if self.every[-1] else reader.line_ends))
        if char == "\\":
            return self.property() or self.known(reader.escape())
        return self.known(((ord(char), ord(char)),))

    def repetition(self) -> str:
        """Read a repetition, `*`, `+`, `?` or a count such as `{2,5}`, and return it as text.

        A `?` after it (lazy) is dropped, since it does not change what the expression matches.
        """
        reader, begin = self.reader, self.reader.at
        found = COUNT.match(reader.pattern, begin)
        if not self.repeatable or (reader.peek() == "{" and not found):
            raise reader.refuse(f"{reader.peek()!r} is out of place")
        reader.at = found.end() if found else begin + 1
        self.repeatable = False
        written = reader.pattern[begin : reader.at]
        reader.take("?")  # lazy or not, the language is the same
        return written

    def group(self) -> str:
        """Read the beginning of a group after its `(`, such as `?:`; return it as llguidance writes it.

        It may also be flags for the rest of the group around it, such as `(?i)`.
        """
        reader = self.reader
        if reader.peek() != "?":
            self.every.append(self.every[-1])
            return "(?:"
        found = _GROUP.match(reader.pattern, reader.at)
        if not found or (found[3] == ")" and self.ecmascript):
            raise reader.refuse(
                "a group must begin with '?:', a name, or flags of i and s: nothing can look around"
            )
        reader.at = found.end()
        on, off = found[1] or "", found[2] or ""
        every = "s" not in off and ("s" in on or self.every[-1])
        ignored = ("i" if "i" in on else "") + ("-i" if "i" in off else "")
        if found[3] == ")":
            self.every[-1] = every
            return f"(?{ignored})" if ignored else ""
        self.every.append(every)
        return f"(?{ignored}:"

    def char_class(self) -> str:
        """Read a character class after its `[`, up to `]`; return it as llguidance writes it."""
        reader = self.reader
        negated = reader.take("^")
        ranges, properties = list[tuple[int, int]](), list[str]()
        if reader.take("]"):
            if not self.ecmascript:
                raise reader.refuse("a class is empty; write \\] for the character")
            return spelled(complement(()), negated=not negated)
        while not reader.take("]"):
            begin = reader.at
            if reader.take("\\") and (found := self.property()):
                properties.append(found)
                continue
            reader.at = begin
            part = reader.class_part()
            ranges += part if negated else self.written(part)
        return spelled(tuple(ranges), "".join(properties), negated=negated)

    def property(self) -> str:
        r"""Read a property such as `\p{L}` and return it unchanged; return "" if none comes next."""
        found = _PROPERTY.match(self.reader.pattern, self.reader.at)
        self.reader.at = found.end() if found else self.reader.at
        return f"\\{found[0]}" if found else ""

    def known(self, ranges: Ranges) -> str:
        """Return `ranges` (of code points) as a character class in llguidance's notation.

        Raises:
            ValueError: `ranges` is one control character in a JSON schema, where none is ever written.
        """
        return spelled(self.written(ranges))

    def written(self, ranges: Ranges) -> Ranges:
        """Return `ranges` (of code points) unchanged, unless a JSON schema names one control character.

        Raises:
            ValueError: `ranges` is such a character, which is never written.
        """
        (low, high), *more = ranges
        if self.ecmascript and not more and low == high and CONTROL.match(chr(low)):
            raise self.reader.refuse("it has a control character, which is never written")
        return ranges


def spelled(ranges: Ranges, properties: str = "", *, negated: bool = False) -> str:
    r"""Return a character class in the notation of the regex crate, such as `[\u0030-\u0039\p{L}]`.

    It means the same in ECMAScript. ranges: of code points. properties: such as `\p{L}`, added to the class.
    negated: all other characters.
    """
    parts = [
        _char(low) if low == high else f"{_char(low)}-{_char(high)}"
        for low, high in (
            (_scalar(low, 0xE000), _scalar(high, 0xD7FF)) for low, high in ranges
        )
        if low <= high
    ]
    if len(parts) == 1 and not properties and not negated and ranges[0][0] == ranges[0][1]:
        return parts[0]
    return f"[{'^' if negated else ''}{''.join(parts)}{properties}]"


def _scalar(code: int, instead: int) -> int:
    """Return the code point `code`, or `instead` for half of a surrogate pair (no character)."""
    return instead if 0xD800 <= code <= 0xDFFF else code


def _char(code: int) -> str:
    char = chr(code)
    return char if (char.isascii() and char.isalnum()) or code > 0xFFFF else f"\\u{code:04X}"
