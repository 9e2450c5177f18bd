"""Render a conversation with the chat template that a model's author publishes beside the weights.

A template is a Jinja program (https://huggingface.co/docs/transformers/chat_templating_writing) that comes
from whoever published the model, so it runs in Jinja's sandbox: no attribute that starts with an underscore,
and nothing that changes the objects it was given. The environment is the one that `transformers` documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import UserError

Message = Mapping[str, Any]
"""One turn: `role` (`system`, `user`, `assistant`, ...), `content`, and what else the template looks at."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`, which may refer to the names in `special_tokens` (`bos_token`, `eos_token`, ...).

        Raises:
            UserError: it is not a Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template is not valid ({error})") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt for a conversation, special tokens included as text.

        Args:
            messages: the turns so far.
            add_generation_prompt: whether to end with the words that open the assistant's turn.
            variables: passed to the template, such as `tools` or `enable_thinking`.

        Raises:
            UserError: a message has no role or content, or the template refuses the conversation.
        """
        if not messages:
            raise UserError("messages is empty, but a chat needs at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"messages[{index}] must be an object with a role and a content")
            if "content" not in message and "tool_calls" not in message:
                raise UserError(f"messages[{index}] has no content")
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the model's chat template does not take these messages ({error})") from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes for HTML, which a language model would see as other text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
