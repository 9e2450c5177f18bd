"""Formats in which families of models write calls, and grammars that keep arguments to their schema.

A chat template shows a model its tools, and earlier calls as they are written. The model writes its own calls
likewise, so the format is read off the template. What is free text, and what must be a call, is one grammar:
text up to a trigger that no text holds, and behind it calls and nothing else (a structural tag).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UserError
from common.sampling.grammar import Grammar
from common.text.tokenizer import Tokenizer
from phases.appendix.guidance.exact import OPTIONS, exact

Schema = dict[str, Any]
_OPTIONS = OPTIONS | {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,12}"}
"""Between the parts of a call's JSON: three levels; without a limit some models never stop."""


@dataclass(frozen=True)
class CallFormat:
    """The format of calls: `trigger before call between call after`.

    A call is `{"name": NAME, ARGUMENTS: {...}}`.

    trigger: what begins calls; empty: an output that begins with a brace is a call, and there is one only.
    arguments: the key of the arguments.
    token: of the trigger, where it is a special token, which text cannot spell.
    short_ids: calls have ids of nine letters and digits, and templates insist.
    """

    name: str
    trigger: str
    before: str = ""
    between: str = ""
    after: str = ""
    arguments: str = "arguments"
    token: int | None = None
    short_ids: bool = False

    @property
    def opening(self) -> str:
        """Return the beginning of a call, up to its name."""
        return '{"name": "'

    @property
    def middle(self) -> str:
        """The text between a call's name and its arguments."""
        return f'", "{self.arguments}": '

    def grammar(
        self, tools: Sequence[tuple[str, Schema]], *, must: bool, several: bool, content: Schema | None = None
    ) -> Grammar:
        """Return the grammar of an output with these tools (name and schema of the arguments).

        Args:
            must: it has to be a call; otherwise it may be text, and calls may follow that.
            several: more than one call may be made.
            content: the schema of what is no call, instead of free text.
        """
        rules = [
            f'call_{place}: {_text(self.opening + name + self.middle)} {_json(schema)} "}}"'
            for place, (name, schema) in enumerate(tools)
        ]
        rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
        more = f"({_text(self.between)} call)*" if several and self.between else ""
        rules.append(f"calls: {_text(self.before)} call {more} {_text(self.after)}")
        trigger = _text(self.trigger) if self.token is None else f"<[{self.token}]>"
        if must:
            rules.append(f"start: {trigger} calls")
        elif content is not None:
            rules.append(f"start: {_json(content)} | {trigger} calls")
        elif not self.trigger:
            rules += ["start: TEXT | calls", r"TEXT: /([^{](?s:.*))?/"]
        elif self.token is None:
            rules += ["start: TEXT | head calls", f"head[lazy]: TEXT {trigger}", r"TEXT: /(?s:.*)/"]
        else:
            spelled = "".join(f"[{char}]" if char.isalnum() else f"\\{char}" for char in self.trigger)
            rules += ["start: TEXT | TEXT trigger calls", f"trigger: {trigger}"]
            rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){spelled}(?s:.*)/")
        return Grammar.lark("%llguidance {}\n" + "\n".join(rules) + "\n")


HERMES = CallFormat("Hermes", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""Nous' Hermes and Qwen."""
MISTRAL = CallFormat("Mistral", "[TOOL_CALLS]", " [", ", ", "]", short_ids=True)
LLAMA = CallFormat("Llama", "", arguments="parameters")
"""Llama 3.1 and later: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/."""


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Return True if the model's chat template shows it tools."""
    return "tools" in tokenizer.tool_template.variables


def format_of(tokenizer: Tokenizer) -> CallFormat:
    """Return the format in which the tokenizer's model writes calls, by its chat template.

    A model whose template shows no tools has them described in Hermes' form.

    Raises:
        UserError: the model has no template, or one whose calls are not known here.
    """
    template = tokenizer.tool_template
    source = template.source
    known: CallFormat | None = None
    if not shows_tools(tokenizer) or (
        "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source
    ):
        known = HERMES
    elif "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        known = MISTRAL
    elif '"parameters": ' in source and ("ipython" in source or "<|python_tag|>" in source):
        known = LLAMA
    if known is None:
        raise UserError(
            "tools cannot be had from this model: its chat template writes calls in none of the forms known "
            "here, which are Hermes', Mistral's and Llama 3's"
        )
    token = tokenizer.backend.token_to_id(known.trigger) if known.trigger else None
    return replace(known, token=token) if token in tokenizer.special_ids else known


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: Schema) -> str:
    try:
        return "%json " + json.dumps({**exact(schema), "x-guidance": _OPTIONS})
    except ValueError as error:
        raise UserError(str(error)) from None
