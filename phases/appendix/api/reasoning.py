"""Reasoning, which some models write between `<think>` and `</think>` before their answer."""

from __future__ import annotations

from typing import Literal

from common.text.tokenizer import Tokenizer
from phases.appendix.tools.reader import settled

BEGIN, END = "<think>", "</think>"
TAIL = 8
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""


def opened(tokenizer: Tokenizer, prompt: list[int]) -> bool | None:
    """Return True if the output begins within reasoning, False if it may begin with some.

    None: the model's template knows no reasoning, so none is looked for.
    """
    if BEGIN not in tokenizer.chat_template.source:
        return None
    return tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip().endswith(BEGIN)


def marks(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the marks that are special tokens, which belong to the text then."""
    ids = {tokenizer.backend.token_to_id(mark) for mark in (BEGIN, END)}
    return tokenizer.special_ids & ids


class ReasoningReader:
    """Parts one output, piece by piece, into its reasoning and what follows.

    opened: see the function.
    trigger: of calls, which end the reasoning, too; empty for none.
    """

    def __init__(self, opened: bool, trigger: str = "") -> None:
        self._state: Literal["start", "within", "behind", "text"] = (
            "within" if opened else "start"
        )
        self._ends = [END, trigger] if trigger else [END]
        self._rest, self._begun = "", False

    def read(self, text: str, last: bool) -> tuple[str, str]:
        """Take in what comes next, and whether it is the last of it; return reasoning and text."""
        self._rest += text
        if self._state == "start":
            begun = self._rest.lstrip()
            if begun.startswith(BEGIN):
                self._rest, self._state = begun.removeprefix(BEGIN), "within"
            elif last or not BEGIN.startswith(begun):
                self._state = "text"
        thought = self._thought(last) if self._state == "within" else ""
        if self._state == "behind":
            self._rest = self._rest.lstrip()
            self._state = "text" if self._rest or last else "behind"
        if self._state != "text":
            return thought, ""
        text, self._rest = self._rest, ""
        return thought, text

    def _thought(self, last: bool) -> str:
        """Return what is known to be reasoning."""
        if not self._begun:
            self._rest = self._rest.lstrip()
        places = [place for end in self._ends if (place := self._rest.find(end)) >= 0]
        size = (
            min(places)
            if places
            else len(self._rest)
            if last
            else settled(self._rest, *self._ends)
        )
        thought, self._rest = self._rest[:size], self._rest[size:]
        if places:
            thought = thought.rstrip()
            self._rest = self._rest.removeprefix(END)
            self._state = "behind"
        self._begun = self._begun or bool(thought)
        return thought
