"""Split an output's text into content and tool calls, piece by piece, as the text comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Literal

from common.text.marks import decided_length
from phases.appendix.tools.formats import OPENING, CallFormat
from phases.appendix.tools.written import decode_written
from serving.seams import Delta


def settled(text: str, *marks: str) -> int:
    """Return how many first characters of `text` cannot belong to a mark that begins at its end.

    Spaces before the mark do not count either: they are dropped if a mark follows. marks: such as
    `<tool_call>`.
    """
    return len(text[: decided_length(text, *marks)].rstrip())


class CallReader:
    """Splits one output into text and tool calls, as its text comes.

    The output follows a grammar, so only the beginnings and ends of calls must be found. Text that may begin
    a call, and spaces before it, are held back until that is decided. A second call is held back until it is
    complete: a call that is cut off could neither be carried out nor be taken back.

    format: in which the model writes calls. must: the output is nothing but calls, so the beginning of a mark
        (such as `<tool_call>`) at its end is no content.
    """

    def __init__(self, format: CallFormat, must: bool = False) -> None:
        self.format = format
        self.must = must
        self.answer: Callable[[str, bool], str] | None = None  # all is
        self.reasoning_tokens = 0
        self.complete = False
        self.calls: list[dict[str, Any]] = []
        self._state: Literal["start", "text", "name", "arguments"] = "start"
        self._rest = ""
        # JSON has neither, so without a mark it ends with the text.
        self._end = "}" + (format.after or "\0")
        self._held: list[Delta] = []  # of a call behind another one

    def deltas(self, text: str, last: bool) -> list[Delta]:
        """Add `text`, the output's next text; return what it adds to the message, in OpenAI's form.

        Each delta is a dictionary with `content` or `tool_calls`. last: the output has ended, so nothing is
        held back.
        """
        self._rest += text
        deltas = self._text(last) if self._state in ("start", "text") else []
        while (self._state == "name" and self._name(deltas)) or self._state == "arguments":
            if not self._arguments(deltas, last):
                break
        if last and self._held:  # it was cut off, and there are others
            self.calls.pop()
            self._held = []
        return deltas

    def _text(self, last: bool) -> list[Delta]:
        trigger, rest = self.format.trigger, self._rest
        if trigger:
            at = rest.find(trigger)
        else:
            at = 0 if self._state == "start" and rest.startswith("{") else -1
        if at >= 0:
            content = rest[:at].rstrip()
            self._rest = rest[at + len(trigger) :]
            self._state = "name"
        else:
            whole = not trigger or (last and not self.must)
            known = len(rest) if whole else settled(rest, trigger)
            content, self._rest = rest[:known], rest[known:]
            self._state = "text" if rest else self._state
        return [{"content": content}] if content else []

    def _name(self, deltas: list[Delta]) -> bool:
        """Begin a tool call and append its name to `deltas`; return False if the name is not complete yet.

        True: its arguments follow.
        """
        middle, begin = self.format.middle, self._rest.find(OPENING) + len(OPENING)
        end = self._rest.find(middle, begin)
        if end < 0:
            return False
        function = {"name": self._rest[begin:end], "arguments": ""}
        self.calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
        self._append_delta(deltas, **self.calls[-1] | {"function": {**function}})
        self._rest, self._state = self._rest[end + len(middle) :], "arguments"
        self.complete = len(self.calls) > 1  # then this one is left out if it is cut off
        return True

    def _arguments(self, deltas: list[Delta], last: bool) -> bool:
        """Append the next part of a tool call's arguments to `deltas`.

        Return True if the call has ended, so that another may follow; False if more of its text may come.
        last: the output has ended.
        """
        function, at = self.calls[-1]["function"], self._rest.find(self._end)
        size = at if at >= 0 else settled(self._rest, self._end)
        whole = at >= 0 or (last and _is_whole(function["arguments"] + self._rest[:size]))
        if last and not whole:
            size = len(self._rest)
            whole = _is_whole(function["arguments"] + self._rest)
        if size:
            self._append_delta(deltas, function={"arguments": self._rest[:size]})
            function["arguments"] += self._rest[:size]
        if whole:
            deltas += self._held
            self._held, self.complete = [], True
        self._rest = self._rest[at + len(self._end) if at >= 0 else size :]
        self._state = "name" if at >= 0 else "arguments"
        return at >= 0

    def _append_delta(self, deltas: list[Delta], **call: Any) -> None:
        out = deltas if len(self.calls) == 1 else self._held
        out.append({"tool_calls": [{"index": len(self.calls) - 1, **call}]})


def _is_whole(text: str) -> bool:
    return bool(text) and decode_written(text) is not None
