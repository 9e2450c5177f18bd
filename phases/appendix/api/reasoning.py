"""Reasoning: switched and measured by a request's fields, and parted from the answer as the text comes.

Some models write it between `<think>` and `</think>` before their answer, gpt-oss in a channel of its own.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from functools import partial
from typing import Literal

from msgspec import Struct

from common.errors import UserError
from common.text.tokenizer import Tokenizer
from phases.appendix.tools.formats import HERMES, OPENING
from phases.appendix.tools.reader import decided_length, settled
from serving.parsed import ParsedRequest

BEGIN, END = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""Marks of gpt-oss's format behind a message: https://github.com/openai/harmony."""
TAIL = 8
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""


class ReasoningFields(Struct, kw_only=True):
    """Fields about reasoning."""

    reasoning_effort: str | None = None
    separate_reasoning: bool | None = True


class Reasoning:
    """A handler that sets how much the model reasons, and splits the reasoning from the answer."""

    fields = ReasoningFields

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.names = frozenset(ReasoningFields.__struct_fields__)
        if reasons(tokenizer):
            self.names |= {"messages"}  # any chat's answer may have some

    def read(self, given: ReasoningFields, request: ParsedRequest) -> None:
        """Read the fields about reasoning, and choose what splits the output."""
        if given.reasoning_effort is not None:
            self._effort(given.reasoning_effort, request)
        if not request.constrained and given.separate_reasoning is not False:
            request.on_prompt.append(partial(self._part, request))

    def _effort(self, effort: str, request: ParsedRequest) -> None:
        """Set the template's variables; a template that knows none of them is named in a header."""
        known = self.tokenizer.chat_template.variables
        if effort == "none":
            request.variables.setdefault("enable_thinking", False)
        else:
            request.variables.setdefault("reasoning_effort", effort)
        if not known & {
            "reasoning_effort",
            *({"enable_thinking"} if effort == "none" else ()),
        }:
            request.ignored.append("reasoning_effort")

    def _part(self, request: ParsedRequest) -> None:
        tokenizer = self.tokenizer
        if has_channels(tokenizer):
            has_calls = request.calls is not None
            request.reasoning = lambda: ChannelReader(has_calls)
            marks = [CHANNEL, MESSAGE, *ENDS]
        else:
            within = opened(tokenizer, request.prompts[0])
            if within is None:
                return
            trigger = "" if request.calls is None else HERMES.trigger
            request.reasoning = partial(ThinkReader, within, trigger)
            marks = [BEGIN, END]
        ids = {tokenizer.backend.token_to_id(mark) for mark in marks}
        request.shown |= tokenizer.special_ids & ids


def reasons(tokenizer: Tokenizer) -> bool:
    """Return True if the model writes reasoning."""
    try:
        return BEGIN in tokenizer.chat_template.source or has_channels(tokenizer)
    except UserError:  # it has no template
        return False


def has_channels(tokenizer: Tokenizer) -> bool:
    """Return True if the model writes gpt-oss's format."""
    source = tokenizer.chat_template.source
    return CHANNEL in source and MESSAGE in source


def opened(tokenizer: Tokenizer, prompt: list[int]) -> bool | None:
    """Return True if the output begins within reasoning, False if it may begin with some.

    None: the model's chat template has no reasoning, so none is looked for. prompt: token ids.
    """
    if BEGIN not in tokenizer.chat_template.source:
        return None
    return tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip().endswith(BEGIN)


class ThinkReader:
    """Splits an output's text between `<think>` and `</think>`, where it begins, from the answer behind it.

    opened: whether the output begins within reasoning; None: it has none.
    trigger: of calls, which end the reasoning, too; empty for none.
    """

    def __init__(self, opened: bool, trigger: str = "") -> None:
        self._state: Literal["start", "within", "behind", "text"] = (
            "within" if opened else "start"
        )
        self._ends = [END, trigger] if trigger else [END]
        self._rest = ""
        self._reasoning_parts: list[str] = []
        self._offsets: list[int] = []  # where the text of each token ends
        self._begin = 0
        self._stop: int | None = None if opened else 0  # where the reasoning ends
        self._reasoning_begun = False

    @property
    def reasoning_tokens(self) -> int:
        """Return how many tokens so far belong to the reasoning, at least in part."""
        offsets, count = self._offsets, len(self._offsets)
        if not count or self._stop == 0:
            return 0
        stop = offsets[-1] if self._stop is None else self._stop
        return max(
            0, min(bisect_left(offsets, stop) + 1, count) - bisect_right(offsets, self._begin)
        )

    def take_reasoning(self) -> str:
        """Return the reasoning that has come since the last call."""
        reasoning, self._reasoning_parts = "".join(self._reasoning_parts), []
        return reasoning

    def read(self, text: str, last: bool) -> str:
        """Add the text of the next token; return what of it belongs to the answer. last: the output has
        ended.
        """
        if self._state == "text":
            return text
        total = (self._offsets[-1] if self._offsets else 0) + len(text)
        if text or not last:
            self._offsets.append(total)
        self._rest += text
        if self._state == "start":
            begun = self._rest.lstrip()
            if begun.startswith(BEGIN):
                self._rest, self._state = begun.removeprefix(BEGIN), "within"
                self._begin, self._stop = total - len(self._rest), None
            elif last or not BEGIN.startswith(begun):
                self._state = "text"
        if self._state == "within":
            self._think(total, last)
        if self._state == "behind":
            self._rest = self._rest.lstrip()
            self._state = "text" if self._rest or last else "behind"
        if self._state != "text":
            return ""
        text, self._rest = self._rest, ""
        return text

    def _think(self, total: int, last: bool) -> None:
        """Record that the first `total` characters are reasoning."""
        if not self._reasoning_begun:
            self._rest = self._rest.lstrip()
        starts = [start for end in self._ends if (start := self._rest.find(end)) >= 0]
        size = (
            min(starts)
            if starts
            else len(self._rest)
            if last
            else settled(self._rest, *self._ends)
        )
        reasoning, rest = self._rest[:size], self._rest[size:]
        if starts:
            self._stop = total - len(rest)
            reasoning, rest = reasoning.rstrip(), rest.removeprefix(END)
            self._state = "behind"
        self._rest = rest
        if reasoning:
            self._reasoning_parts.append(reasoning)
            self._reasoning_begun = True


class ChannelReader:
    """Splits an output in gpt-oss's format, messages with a channel each, into reasoning and answer.

    `analysis` is reasoning, `final` the answer. A call becomes the text of one in Hermes' form, which a
    `CallReader` knows.

    calls: whether there are tools that may be called.
    """

    def __init__(self, calls: bool) -> None:
        self.reasoning_tokens = 0
        self._calls = calls
        self._state: Literal["start", "head", "analysis", "answer", "call"] = "start"
        self._rest = ""
        self._reasoning_parts: list[str] = []

    def take_reasoning(self) -> str:
        """Return the reasoning that has come since the last call."""
        reasoning, self._reasoning_parts = "".join(self._reasoning_parts), []
        return reasoning

    def read(self, text: str, last: bool) -> str:
        """Add the text of the next token; return what of it belongs to the answer. last: the output has
        ended.
        """
        self._rest += text
        before, answer = self._state, list[str]()
        if self._state == "start":
            if CHANNEL.startswith(self._rest[: len(CHANNEL)]) and not last:
                self._state = "start" if len(self._rest) < len(CHANNEL) else "head"
            else:
                self._state = "head" if self._rest.startswith(CHANNEL) else "answer"
        while self._state != "start" and self._step(answer, last):
            pass
        if before == self._state == "analysis":
            self.reasoning_tokens += 1
        return "".join(answer)

    def _step(self, answer: list[str], last: bool) -> bool:
        """Read up to the next special mark, and append to `answer`; return True if there was a mark."""
        marks = (MESSAGE,) if self._state == "head" else ENDS
        found = [(place, mark) for mark in marks if (place := self._rest.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self._rest = self._rest[:place], self._rest[place + len(mark) :]
        elif self._state == "head":
            return False
        else:
            size = len(self._rest) if last else decided_length(self._rest, *marks)
            text, self._rest = self._rest[:size], self._rest[size:]
        if self._state == "analysis" and text:
            self._reasoning_parts.append(text)
        elif self._state == "head":
            answer.append(self._open(text))
            return True
        elif self._state != "analysis":
            answer.append(text)
        if found:
            answer.append("}" + HERMES.after + "\n" if self._state == "call" else "")
            self._state = "head"
        return bool(found)

    def _open(self, head: str) -> str:
        """Begin a message; return what stands in the answer for its head."""
        channel, _, to = head.rpartition(CHANNEL)[2].strip().partition(" ")
        name = to.strip().removeprefix("to=functions.").partition(" ")[0].partition("<")[0]
        if self._calls and to.strip().startswith("to=functions."):
            self._state = "call"
            return (
                HERMES.trigger
                + HERMES.before
                + OPENING
                + json.dumps(name)[1:-1]
                + HERMES.middle
            )
        self._state = "analysis" if channel == "analysis" else "answer"
        return ""
