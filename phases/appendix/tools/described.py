"""Tools for models whose chat template has no known form for tool calls: text in the system message.

Calls and their results in the conversation become text, too, as Hermes and Qwen write them:
https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import UserError

Message = dict[str, Any]
WARNING = (
    b"tools are described in the system message: the chat template has no known form for calls"
)
_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def described(messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
    """Return a chat's messages with tools, tool calls and their results as plain text (Hermes' form).

    messages: each call's arguments are an object. tools: put into the system message.
    """
    made, answered = list[Message](), False
    for message in messages:
        is_result = message.get("role") == "tool"
        if calls := message.get("tool_calls"):
            said = text_of(message.get("content"))
            written = "\n".join([said] * bool(said) + [_call(call) for call in calls])
            message = {
                field: value for field, value in message.items() if field != "tool_calls"
            }
            made.append(message | {"content": written})
        elif is_result:
            answer = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            if answered:  # results of several calls are one turn
                answer = made.pop()["content"] + "\n" + answer
            made.append({"role": "user", "content": answer})
        else:
            made.append(message)
        answered = is_result
    if not tools:
        return made
    return with_system(made, _TEXT.format(tools="\n".join(map(json.dumps, tools))))


def with_system(
    messages: Sequence[Message], text: str, *, first: bool = False
) -> list[Message]:
    """Return `messages` with `text` at the end of the system message; add one if there is none.

    Chat templates take only one such message. first: put the text at its beginning instead.
    """
    system, *others = messages or [{}]
    if system.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    said = text_of(system.get("content"))
    texts = [text, said] if first else [said, text]
    return [{**system, "content": "\n\n".join(filter(None, texts))}, *others]


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text, None, or a list of parts.

    Parts are joined by line breaks; the text of None is "", and that of a refusal what it says.

    Raises:
        UserError: it is something else, or a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = [
        part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        for part in (content if isinstance(content, list) else [content])
    ]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(
            "messages have a content with parts that are no texts, and this model takes texts alone"
        )
    return "\n".join(map(str, texts))


def _call(call: Message) -> str:
    function = call["function"]
    written = json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"<tool_call>\n{written}\n</tool_call>"
