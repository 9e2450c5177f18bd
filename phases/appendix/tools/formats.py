"""Formats in which families of models write tool calls, and grammars that make calls follow their schemas.

A chat template shows a model its tools, and earlier calls as they are written. The model writes its own calls
in the same way, so the format is inferred from the template. One grammar says what is free text and what must
be a call: text up to a trigger that no text contains, and after it only calls (a structural tag).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.sampling.grammar import Grammar
from common.text.tokenizer import Tokenizer
from phases.appendix.guidance.exact import OPTIONS, exact

Schema = dict[str, Any]
_OPTIONS = OPTIONS | {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,12}"}
"""Between the parts of a call's JSON: three levels; without a limit some models never stop."""


OPENING = '{"name": "'
"""The beginning of a call, up to its name."""


@dataclass(frozen=True)
class CallFormat:
    """Format in which a model writes tool calls: `{"name": NAME, ARGUMENTS: {...}}` between marks (texts).

    trigger: text that begins the calls; empty: an output that begins with a brace is one call and nothing
        else.
    before, after: texts between the trigger and the brace, and after the call.
    arguments: the key of the arguments, ARGUMENTS.
    """

    trigger: str = ""
    before: str = ""
    after: str = ""
    arguments: str = "arguments"

    @property
    def middle(self) -> str:
        """Return the text between a call's name and its arguments, such as `", "arguments": `."""
        return f'", "{self.arguments}": '

    def grammar(
        self,
        tools: Sequence[tuple[str, Schema]],
        *,
        must: bool,
        several: bool,
        content: Schema | None = None,
    ) -> Grammar:
        """Return the grammar of an output that may call tools.

        Args:
            tools: (name, schema of the arguments) of each tool.
            must: the output has to be a call; otherwise it may be text, and calls may follow the text.
            several: more than one call may be made.
            content: schema of an output that is no call; None: that is free text.

        Raises:
            UserError: a schema cannot be followed.
        """
        rules = [
            f'call_{place}: {_text(OPENING + name + self.middle)} {_json(schema)} "}}"'
            for place, (name, schema) in enumerate(tools)
        ]
        rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
        between = f"{self.after}\n{self.trigger}{self.before}"
        more = f"({_text(between)} call)*" if several and self.trigger else ""
        rules.append(f"calls: {_text(self.before)} call {more} {_text(self.after)}")
        trigger = _text(self.trigger)
        if must:
            rules.append(f"start: {trigger} calls")
        elif content is not None:
            rules.append(f"start: {_json(content)} | {trigger} calls")
        elif not self.trigger:
            rules += ["start: TEXT | calls", r"TEXT: /([^{](?s:.*))?/"]
        else:
            rules += [
                "start: TEXT | head calls",
                f"head[lazy]: TEXT {trigger}",
                r"TEXT: /(?s:.*)/",
            ]
        return Grammar.lark("%llguidance {}\n" + "\n".join(rules) + "\n")


HERMES = CallFormat("<tool_call>", "\n", "\n</tool_call>")
"""Nous' Hermes and Qwen."""
LLAMA = CallFormat(arguments="parameters")
"""Llama 3.1 and later: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/."""


def format_of(tokenizer: Tokenizer) -> tuple[CallFormat, bool]:
    """Return (format in which a model writes tool calls, whether its chat template shows it tools).

    If the template shows none, or asks for another form of calls, the result is (Hermes' format, False).

    Raises:
        UserError: the model has no template.
    """
    template = tokenizer.templates.tools
    source, shows = template.source, "tools" in template.variables
    if "<tool_call>" in source:
        return HERMES, shows and "<function=" not in source and "<arg_key>" not in source
    llama = '"parameters": ' in source and ("ipython" in source or "<|python_tag|>" in source)
    return (LLAMA, True) if shows and llama else (HERMES, False)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: Schema) -> str:
    try:
        return "%json " + json.dumps({**exact(schema), "x-guidance": _OPTIONS})
    except ValueError as error:
        raise UserError(str(error)) from None
