"""From an output's text to content and calls, piece by piece, as the text comes."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any, Literal

from phases.appendix.tools.formats import CallFormat

_LETTERS = string.ascii_letters + string.digits


def settled(text: str, *marks: str) -> int:
    """Return how much of a text can be no beginning of a mark, nor spaces before one."""
    sizes = (range(min(len(mark) - 1, len(text)), 0, -1) for mark in marks)
    held = (
        next((size for size in each if text.endswith(mark[:size])), 0)
        for mark, each in zip(marks, sizes, strict=True)
    )
    return len(text[: len(text) - max(held)].rstrip())


@dataclass
class Called:
    """A call as far as it is known: `arguments` is JSON, or the beginning of it."""

    id: str
    name: str
    arguments: str = ""

    def shape(self, arguments: str) -> dict[str, Any]:
        """Return the call as answers have it, with these arguments."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class News:
    """The text and calls that a piece of text has brought.

    calls: by their places; a call's first news has its name, all have what is new of its arguments.
    """

    content: str = ""
    calls: list[tuple[int, str, bool]] = field(default_factory=list)


class CallReader:
    """Reads one output.

    The grammar has seen to the form, so this needs only to find the borders. Text that may be the beginning
    of a trigger, and spaces that may stand before one, are held back until that is decided.

    complete: calls were made, and the last one is whole.
    """

    def __init__(self, format: CallFormat) -> None:
        self.format = format
        self.calls: list[Called] = []
        self._state: Literal["start", "text", "name", "arguments", "between", "end"] = "start"
        self._rest, self._skip = "", format.before
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def complete(self) -> bool:
        """See the class."""
        return bool(self.calls) and self._state in ("between", "end")

    def read(self, text: str, last: bool) -> News:
        """Take in what comes next, and whether it is the last of it."""
        self._rest += text
        news, before = News(), ""
        while self._state != before:
            before = self._state
            match before:
                case "start":
                    self._start()
                case "text":
                    self._text(news, last)
                case "name":
                    self._name(news)
                case "arguments":
                    self._arguments(news)
                case "between":
                    self._between(last)
        return news

    def _start(self) -> None:
        if self.format.trigger:
            self._state = "text"
        elif self._rest:
            self._state = "name" if self._rest.startswith("{") else "text"

    def _text(self, news: News, last: bool) -> None:
        trigger, rest = self.format.trigger, self._rest
        at = rest.find(trigger) if trigger else -1
        if at >= 0:
            news.content += rest[:at].rstrip()
            self._rest, self._state = rest[at + len(trigger) :], "name"
            return
        known = len(rest) if last or not trigger else settled(rest, trigger)
        news.content += rest[:known]
        self._rest = rest[known:]

    def _name(self, news: News) -> None:
        opening = self._skip + self.format.opening
        end = self._rest.find(self.format.middle, len(opening))
        if end < 0:
            return
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if self.format.short_ids else 24))
        made = Called(letters if self.format.short_ids else f"call_{letters}", self._rest[len(opening) : end])
        self.calls.append(made)
        news.calls.append((len(self.calls) - 1, "", True))
        self._rest = self._rest[end + len(self.format.middle) :]
        self._state = "arguments"

    def _arguments(self, news: News) -> None:
        size = self._end_of_object()
        piece, self._rest = self._rest[:size], self._rest[size:]
        if piece:
            self.calls[-1].arguments += piece
            news.calls.append((len(self.calls) - 1, piece, False))
        if self._depth == 0 and self.calls[-1].arguments.endswith("}"):
            self._state = "between"

    def _end_of_object(self) -> int:
        """Return how many of the next characters belong to the object that is open."""
        for place, char in enumerate(self._rest):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = not self._escaped and char == "\\"
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._rest)

    def _between(self, last: bool) -> None:
        between = "}" + self.format.between
        if self.format.between and self._rest.startswith(between):
            self._rest, self._skip, self._state = self._rest[len(between) :], "", "name"
        elif last or not between.startswith(self._rest):
            self._state = "end"
