"""Prompts that end within the last message, for an output that continues it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import UserError
from common.text.chat_template import ChatTemplate, Message

_HERE = "\U0010ffff "
"""Marks the end of a content that is continued: a character that no text has, and a space."""


def render_continued(
    template: ChatTemplate, messages: Sequence[Message], /, **variables: Any
) -> str:
    """Return the prompt for a conversation up to the end of the last message's content.

    If the template drops spaces at this end, the prompt lacks them, as in transformers.

    messages: what `template.conversation` returned. variables: as of `ChatTemplate.render`.

    Raises:
        UserError: the template refuses the conversation, or does not write the last message's content.
    """
    *before, last = messages
    content = last["content"]
    if isinstance(content, list):
        *parts, part = content or [{"type": "text", "text": ""}]
        content = [*parts, {**part, "text": part["text"] + _HERE}]
    else:
        content = (content or "") + _HERE
    rendered = template.render([*before, {**last, "content": content}], **variables)
    text, mark, after = rendered.rpartition(_HERE[0])
    if not mark:
        raise UserError("the model's chat template does not write the last message as it is")
    return text if after.startswith(_HERE[1]) else text.rstrip()
