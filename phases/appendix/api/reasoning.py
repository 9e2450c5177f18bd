"""Reasoning of chat models: how much is set by request fields; its text is split from the answer.

Some models write reasoning between `<think>` and `</think>` before their answer, gpt-oss in a channel of its
own.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from functools import partial
from typing import Literal

from msgspec import Struct

from common.errors import UserError
from common.text.marks import decided_length
from common.text.tokenizer import Tokenizer
from phases.appendix.tools.described import text_of
from phases.appendix.tools.formats import HERMES, OPENING
from phases.appendix.tools.reader import settled
from serving.parsed import ParsedRequest
from serving.seams import Delta, MessageReader

BEGIN, END = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
RECIPIENT = "to=functions."
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""Marks of gpt-oss's format behind a message: https://github.com/openai/harmony."""
TAIL = 8
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""


class ReasoningFields(Struct, kw_only=True):
    """Request fields `reasoning_effort` and `separate_reasoning` (split it from the answer)."""

    reasoning_effort: str | None = None
    separate_reasoning: bool | None = True


class Reasoning:
    """Handles `reasoning_effort` (how much a model reasons) and `separate_reasoning` (split it off)."""

    fields = ReasoningFields

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.names = frozenset({*ReasoningFields.__struct_fields__, "chat_template_kwargs"})
        if reasons(tokenizer):
            self.names |= {"messages"}  # any chat's answer may have some

    def read(self, given: ReasoningFields, request: ParsedRequest) -> None:
        """Set the chat template's variables for the effort, and a reader that splits off reasoning.

        Names of the client's template variables that the template does not read are added to
        `request.ignored`.
        """
        variables = request.fields.get("chat_template_kwargs") or {}
        unread = sorted(variables.keys() - self.tokenizer.templates.plain.variables)
        request.ignored += map("chat_template_kwargs.{}".format, unread)
        if given.reasoning_effort is not None:
            self._effort(given.reasoning_effort, request)
        if not request.constrained and given.separate_reasoning is not False:
            request.on_prompt.append(partial(self._part, request))

    def _effort(self, effort: str, request: ParsedRequest) -> None:
        """Set the chat template's variable for an effort such as "none" or "high".

        If the template does not use it, the field is added to `request.ignored`, which a header shows.
        """
        off = effort == "none"
        name = "enable_thinking" if off else "reasoning_effort"
        request.variables.setdefault(name, False if off else effort)
        if name not in self.tokenizer.templates.plain.variables:
            request.ignored.append("reasoning_effort")

    def _part(self, request: ParsedRequest) -> None:
        """Let a `ReasoningReader` split each output of `request` into reasoning and answer.

        The request's own reader, if any, then reads the answer, such as for tool calls.
        """
        tokenizer, inner = self.tokenizer, request.reader
        if has_channels(tokenizer):
            request.reader = lambda: ChannelReader(inner and inner())
            marks = [CHANNEL, MESSAGE, *ENDS]
        else:
            within = opened(tokenizer, request.prompts[0])
            if within is None:
                return
            if request.variables.get("continue_final_message"):
                said = text_of(request.messages[-1]["content"])
                within = within or said.rfind(BEGIN) > said.rfind(END)
            request.reader = lambda: ThinkReader(within, inner and inner())
            marks = [BEGIN, END]
        ids = {tokenizer.backend.token_to_id(mark) for mark in marks}
        request.shown |= tokenizer.special_ids & ids


def reasons(tokenizer: Tokenizer) -> bool:
    """Return True if the model's chat template shows that the model writes reasoning before an answer.

    False: it does not, or the model has no template.
    """
    try:
        return BEGIN in tokenizer.templates.plain.source or has_channels(tokenizer)
    except UserError:  # it has no template
        return False


def has_channels(tokenizer: Tokenizer) -> bool:
    """Return True if the model's chat template is of gpt-oss's format, in which messages name a channel."""
    source = tokenizer.templates.plain.source
    return CHANNEL in source and MESSAGE in source


def opened(tokenizer: Tokenizer, prompt: list[int]) -> bool | None:
    """Return True if `prompt` (token ids) ends with `<think>`: the output begins with reasoning.

    Return False if it does not, and None if the chat template has no `<think>`, so that the output is not
    split.
    """
    if BEGIN not in tokenizer.templates.plain.source:
        return None
    return tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip().endswith(BEGIN)


class ReasoningReader:
    """Base class of readers that split an output's text, as it comes, into reasoning and answer.

    A `MessageReader` of phase 13: `answer` gets the output's text token by token, `deltas` the text of the
    answer.

    inner: a reader of the answer, such as one that finds tool calls; None: all of the answer is content.
    """

    def __init__(self, inner: MessageReader | None = None) -> None:
        self._inner = inner
        self._rest = ""
        # Each behind so many characters of the answer; and how many of them have come to `deltas`.
        self._reasoning_parts: list[tuple[int, str]] = []
        self._answered = self._read = 0
        self.calls = [] if inner is None else inner.calls

    @property
    def complete(self) -> bool:
        """Return True if the answer has ended after a complete tool call, as `inner` (its reader) says."""
        return self._inner is not None and self._inner.complete

    def answer(self, text: str, last: bool) -> str:
        """Add the output's next token (text); return the text that it adds to the answer, perhaps "".

        Text that may be the beginning of a mark such as `<think>` is held back. last: the output has ended,
        so nothing is held back.
        """
        raise NotImplementedError

    def deltas(self, text: str, last: bool) -> list[Delta]:
        """Add `text`, the next part of the answer; return what it and reasoning add to the chat message.

        Each part is a dictionary in OpenAI's form, such as `{"reasoning_content": "..."}` or `{"content":
        "..."}`, in the order in which the texts came.

        last: the output has ended, so no text is held back.
        """
        found, parts = list[Delta](), self._reasoning_parts
        while parts and (last or parts[0][0] <= self._read + len(text)):
            place, reasoning = parts[0][0], ""
            while parts and parts[0][0] == place:
                reasoning += parts.pop(0)[1]  # a thread may be here while tokens come
            if size := max(0, place - self._read):
                found += self._answer_deltas(text[:size], False)
            self._read, text = self._read + size, text[size:]
            found.append({"reasoning_content": reasoning})
        self._read += len(text)
        return found + self._answer_deltas(text, last)

    def _answer_deltas(self, text: str, last: bool) -> list[Delta]:
        if self._inner is not None:
            return self._inner.deltas(text, last)
        return [{"content": text}] if text else []


class ThinkReader(ReasoningReader):
    """Splits an output's text into the reasoning, from `<think>` to `</think>`, and the answer after it.

    opened: whether the prompt ends with `<think>`, so that the output begins with reasoning; otherwise the
        output may begin with `<think>`.
    inner: a reader that finds tool calls in the answer; the beginning of a call ends the reasoning, too.
        None: there are no tools.
    """

    def __init__(self, opened: bool, inner: MessageReader | None = None) -> None:
        super().__init__(inner)
        self._state: Literal["start", "within", "behind", "text"] = (
            "within" if opened else "start"
        )
        self._ends = [END] if inner is None else [END, HERMES.trigger]
        self._offsets: list[int] = []  # where the text of each token ends
        self._begin = 0
        self._stop: int | None = None if opened else 0  # where the reasoning ends
        self._reasoning_begun = False

    @property
    def reasoning_tokens(self) -> int:
        """Return how many of the output's tokens so far belong to the reasoning, at least in part."""
        offsets, count = self._offsets, len(self._offsets)
        if not count or self._stop == 0:
            return 0
        stop = offsets[-1] if self._stop is None else self._stop
        return max(
            0, min(bisect_left(offsets, stop) + 1, count) - bisect_right(offsets, self._begin)
        )

    def answer(self, text: str, last: bool) -> str:
        """Add the output's next token (text); return the text that it adds to the answer, perhaps "".

        last: the output ends with this token.
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
        """Take reasoning from the unread text, up to `</think>` or a tool call, for `deltas` to return.

        total: characters of the output so far. last: the output has ended, so no text is held back.
        """
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
            self._reasoning_parts.append((0, reasoning))
            self._reasoning_begun = True


class ChannelReader(ReasoningReader):
    """Splits an output in gpt-oss's format, messages with a channel each, into reasoning and answer.

    The channel `analysis` is reasoning, `final` the answer. A tool call becomes text in Hermes' form
    (`<tool_call>` and JSON) within the answer.

    inner: a reader that finds the tool calls in the answer; None: there are no tools.
    """

    reasoning_tokens = 0
    _state: Literal["start", "head", "analysis", "answer", "call"] = "start"

    def answer(self, text: str, last: bool) -> str:
        """Add the output's next token (text); return the text that it adds to the answer, perhaps "".

        last: the output ends with this token.
        """
        self._rest += text
        before, answer = self._state, list[str]()
        if self._state == "start":
            heads = (CHANNEL, " " + RECIPIENT)
            if any(self._rest.startswith(head) for head in heads):
                self._state = "head"
            elif last or not any(head.startswith(self._rest) for head in heads):
                self._state = "answer"
        while self._state != "start" and self._step(answer, last):
            pass
        if before == self._state == "analysis":
            self.reasoning_tokens += 1
        self._answered += sum(map(len, answer))
        return "".join(answer)

    def _step(self, answer: list[str], last: bool) -> bool:
        """Read the output up to its next mark, such as `<|end|>`; return True if there was one.

        False: all the text so far is read. answer: a list to which the text that belongs to the answer is
            appended. last: the output has ended.
        """
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
            place = self._answered + sum(map(len, answer))
            self._reasoning_parts.append((place, text))
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
        """Begin a message of gpt-oss's format; return the text that its head adds to the answer.

        This is the start of a tool call in Hermes' form, or "" for other messages.

        head: all text before the mark `<|message|>`, such as `<|channel|>final`.
        """
        channel = head.rpartition(CHANNEL)[2].strip().partition(" ")[0]
        _, called, name = head.partition(RECIPIENT)  # behind the role or behind the channel
        name = name.partition(" ")[0].partition("<")[0]
        if self._inner is not None and called:
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
