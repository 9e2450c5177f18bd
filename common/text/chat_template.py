"""Render a conversation with the chat template that a model's author publishes beside the weights.

Chat templates are described at https://huggingface.co/docs/transformers/chat_templating_writing. They run in
`template_sandbox`, which states what they may do and how much of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import meta, nodes

from common.errors import UserError, text
from common.text.template_sandbox import TemplateSandbox

Message = Mapping[str, Any]
"""One turn: `role` (`system`, `user`, `assistant`, ...), `content`, and what else the template looks at."""

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_SANDBOX = TemplateSandbox()


class ChatTemplate:
    """A compiled template.

    source: its text.
    variables: what it asks for by name, such as `messages` or `tools`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`, which may refer to the names in `special_tokens` (`bos_token`, `eos_token`, ...).

        Raises:
            UserError: it is not a Jinja template, or exceeds a limit of the sandbox.
        """
        self.source, self._special_tokens = source, dict(special_tokens)
        try:
            self._template = _SANDBOX.load(source)
            tree = _SANDBOX.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
        except Exception as error:  # Jinja's, and Python's own for code that is nested too deeply
            raise UserError(f"the model's chat template is not valid ({_told(error)})") from error
        named = {node.attr for node in tree.find_all(nodes.Getattr)}
        named |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self._fields = named.union(_FIELDS)

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Check messages and bring them into the form that templates expect: contents are strings.

        A message may have the fields of the OpenAI API and those that the template names. A content that is a
        list of parts, `{"type": "text", "text": ...}`, becomes their texts joined.

        Raises:
            UserError: there is none, or one is not of this form.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise UserError(f"messages is a {type(messages).__name__}, but must be a list")
        if not messages:
            raise UserError("messages is empty, but a chat needs at least one message")
        return [self._message(f"messages[{index}]", message) for index, message in enumerate(messages)]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt for a `conversation`, special tokens included as text.

        Args:
            messages: the turns so far.
            add_generation_prompt: whether to end with the words that open the assistant's turn.
            variables: passed to the template, such as `tools` or `enable_thinking`.

        Raises:
            UserError: the template refuses the conversation, fails, or exceeds a limit of the sandbox.
        """
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return _SANDBOX.render(self._template, given)
        except Exception as error:  # a template is a program: it may fail in any way
            raise UserError(
                f"the model's chat template does not take these messages ({_told(error)})"
            ) from error

    def _message(self, name: str, message: Message) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise UserError(f"{name} is {message!r}, but must be an object with a role and a content")
        for field in message:
            if field not in self._fields:
                raise UserError(f"{name} has {field!r}, but may have {', '.join(_FIELDS)}")
        if "role" not in message:
            raise UserError(f"{name} has no role")
        checked = {**message, "role": text(f"{name}.role", message["role"])}
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise UserError(f"{name}.tool_calls is {calls!r}, but must be a list")
        content = message.get("content")
        if isinstance(content, list):
            checked["content"] = "".join(
                _part(f"{name}.content[{place}]", part) for place, part in enumerate(content)
            )
        elif content is not None:
            checked["content"] = text(f"{name}.content", content)
        elif not calls:  # a message that calls tools needs to say nothing
            raise UserError(f"{name} has no content")
        return checked


def _part(name: str, part: Any) -> str:
    """The text of one part of a content."""
    if not isinstance(part, Mapping):
        raise UserError(f"{name} is {part!r}, but must be an object with a type and a text")
    kind = part.get("type")
    if kind != "text":
        raise UserError(f"{name}.type is {kind!r}, but must be 'text'")
    return text(f"{name}.text", part.get("text", None))


def _told(error: Exception) -> str:
    """An error's message in one line, with its kind where Python raised it."""
    words = " ".join(str(error).split())[:500]
    return (
        words
        if type(error).__module__.split(".")[0] in ("jinja2", "common")
        else f"{type(error).__name__}: {words}"
    )
