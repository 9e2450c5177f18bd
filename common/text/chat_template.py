"""Render a conversation with the chat template that a model's author publishes beside the weights.

Chat templates are described at https://huggingface.co/docs/transformers/chat_templating_writing. They run in
`template_sandbox`, which states what they may do and how much of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import UserError, shown, text
from common.names import choice
from common.text.content_parts import NOTHING, texts_of_parts
from common.text.template_sandbox import TemplateError, ask_child

Message = Mapping[str, Any]
"""One turn: `role` (`system`, `user`, `assistant`, ...), `content`, and what else the template reads."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. A template may name others of its own."""
_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"}
)
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with an assistant's reasoning, as different servers and templates call it."""
_OTHER_MEDIA = ("audio", "images", "function_call")
"""Fields that cannot be dropped without changing the message's meaning, and are therefore refused."""


class ChatTemplate:
    """A compiled chat template. source: its text. variables: names that it reads, such as `tools`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`, which may refer to the names in `special_tokens` (`bos_token`, `eos_token`, ...).

        Raises:
            UserError: it is not a Jinja template, or exceeds a limit of the sandbox.
        """
        self.source, self._special_tokens = source, special_tokens
        try:
            found = ask_child(source)
        except TemplateError as error:
            raise UserError(f"the model's chat template is not valid ({error})") from error
        self.variables = frozenset(found["variables"])
        self._takes_parts = found["takes_parts"]
        self._named = frozenset(found["names"])  # so no other field of a message is read

    def conversation(
        self, messages: Sequence[Message], ignored: set[str] | None = None
    ) -> list[dict[str, Any]]:
        """Check messages, and return them in the form that templates expect.

        A message keeps the fields of the OpenAI API and those that the template names; the names of others
        that have a value are added to `ignored`. A content that is a list of texts stays a list for a
        template that reads lists; for other templates the texts are joined by newlines. Only a user must have
        a content. A null or missing one becomes None, or an empty text for an assistant without tool calls.

        Raises:
            UserError: there is no message, or one is not of this form.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise UserError(f"messages is a {type(messages).__name__}, but must be a list")
        if not messages:
            raise UserError("messages is empty, but a chat needs at least one message")
        unread = set[str]() if ignored is None else ignored
        checked = list[dict[str, Any]]()
        for index, message in enumerate(messages):
            checked.append(self._message(f"messages[{index}]", message, unread))
        return checked

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Return the prompt, special tokens included, for the messages that `conversation` returned.

        add_generation_prompt: whether to end with the words that open the assistant's turn.
        variables: passed to the template, such as `tools` or `enable_thinking`.

        Raises:
            UserError: the template refuses the conversation, fails, or exceeds a limit of the sandbox.
        """
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return str(ask_child(self.source, given)["text"])
        except (TemplateError, TypeError, ValueError) as error:  # or what is given is no JSON
            words = f"the model's chat template does not take these messages ({error})"
            raise UserError(words) from error

    def _message(self, name: str, message: Message, ignored: set[str]) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            form = "must be an object with a role and a content"
            raise UserError(f"{name} is {shown(message)}, but {form}")
        if "role" not in message:
            raise UserError(f"{name} has no role")
        role = text(f"{name}.role", message["role"])
        if role not in ROLES and role not in self._named:
            choice(f"{name}.role", role, ROLES)
        checked: dict[str, Any] = {"role": role}
        for field, value in message.items():
            if value in NOTHING:
                continue
            if field in _OTHER_MEDIA:
                words = "but this model takes texts and tool_calls alone"
                raise UserError(f"{name} has {field!r}, {words}")
            if field in _FIELDS or field in self._named:
                checked.setdefault(field, value)
            elif field not in _REASONING:
                ignored.add(field)
        for name_of_it in _REASONING:
            reasoning = message.get(name_of_it)
            if isinstance(reasoning, str):  # a template reads it by one name or the other
                checked |= {field: reasoning for field in _REASONING if field in self._named}
                break
        calls, said = checked.get("tool_calls"), checked.pop("refusal", None)
        if calls is not None and not isinstance(calls, list):
            raise UserError(f"{name}.tool_calls is {shown(calls)}, but must be a list")
        content = message.get("content")
        if content is None and said is not None:
            content = text(f"{name}.refusal", said)
        if isinstance(content, list):
            texts = texts_of_parts(f"{name}.content", content, ignored)
            parts = [{"type": "text", "text": each} for each in texts]
            checked["content"] = parts if self._takes_parts else "\n".join(texts)
        elif content is not None:
            checked["content"] = text(f"{name}.content", content)
        elif role == "user":  # others may call tools only, or may have said nothing
            raise UserError(f"{name} has no content")
        else:
            checked["content"] = "" if role == "assistant" and not calls else None
        return checked


def count_characters(value: Any) -> int:
    """Return how many characters all texts in a value have together."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_characters, value.values()))
    return sum(map(count_characters, value)) if isinstance(value, list) else 0
