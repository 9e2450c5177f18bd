"""Anthropic's route `/v1/messages`: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from msgspec import Struct

from common.http.errors import ApiError, ErrorForm, wrong
from common.json_text import convert_fields
from phases.appendix.protocols.translation import (
    NAMED_EVENT,
    Events,
    Translation,
    call_of,
    renamed,
)
from phases.appendix.tools.described import text_of
from phases.appendix.tools.written import decode_written
from serving.app import App
from serving.completion import Choice
from serving.endpoints import ServedModel
from serving.http.request import HttpRequest
from serving.messages import Ready
from serving.parsed import ParsedRequest

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking",
}
"""Names of fields here, by those of a chat."""
_ERROR = "messages.is_error"


class Block(Struct):
    """A part of a message in Anthropic's form: text, reasoning, a tool call, or a tool's result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class MessageParam(Struct):
    """A message of a conversation in Anthropic's form: its role, and a text or a list of parts."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(Struct):
    """Anthropic's request field `tool_choice`: which tool calls the model must make, or may make."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class MessagesFields(Struct, kw_only=True):
    """Body of Anthropic's `POST /v1/messages`: conversation, system text, tools and settings."""

    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thread: Any = None
    compaction: None = None


def _error(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's form.

    body: OpenAI's form, `{"error": {...}}`. The error's code is in `details`, too, where clients read it.
    """
    error = body["error"]
    if error["code"]:
        error |= {"details": {"error_code": error["code"]}}
    return {"type": "error", "error": error}


class Messages(Translation):
    """Anthropic's route `/v1/messages`: translates its requests to chats, and their responses back."""

    fields = MessagesFields
    names = NAMES
    form = ErrorForm(renamed(NAMES, _error), NAMED_EVENT)

    def translate(self, given: MessagesFields, ignored: list[str]) -> dict[str, Any]:
        """Return the fields of the OpenAI chat that is equivalent to a request.

        If the last message is the assistant's, the output continues it.

        given: Anthropic's fields. ignored: a list to which the names of fields without effect are appended.

        Raises:
            ApiError: the request names a `thread`, a conversation that the server would have to store.
        """
        if given.thread is not None:
            words = "thread is not supported: no message is kept here, so send all of them"
            raise ApiError(400, words, param="thread", code="thread_unsupported_request")
        messages = [made for said in given.messages for made in _messages(said, ignored)]
        fields: dict[str, Any] = {
            "messages": messages,
            "continue_final_message": _continued(messages),
        }
        if given.stop_sequences:
            fields["stop"] = given.stop_sequences
        if given.system:
            fields["system"] = text_of(given.system)
        if given.tools:
            fields["tools"] = [_tool(tool) for tool in given.tools]
        if choice := given.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(
                choice.type, choice.type
            )
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if given.thinking is not None:
            thinks = given.thinking.get("type") != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": thinks}
        output = given.output_config or {}
        if isinstance(form := output.get("format"), dict):
            fields["response_format"] = form
        if (effort := output.get("effort")) is not None:
            fields["reasoning_effort"] = effort
        return fields

    def formatter(
        self, given: MessagesFields, request: ParsedRequest, http: HttpRequest
    ) -> MessageEvents:
        """Return the formatter that writes the chat's response in Anthropic's form.

        given: Anthropic's fields. request: the chat that they were translated to. http: not used.

        Raises:
            ApiError: `max_tokens` is missing.
        """
        if request.generation.max_tokens is None:
            raise wrong("max_tokens", "max_tokens is missing, but must be given")
        return MessageEvents(self.chat.model)


async def count(app: App, messages: Messages, http: HttpRequest) -> None:
    """Respond with the number of tokens of a request's prompt: `{"input_tokens": N}`.

    app: the server. messages: translates the request to a chat. http: the request, whose response is sent.
    """

    def parse(fields: dict[str, Any], ready: Ready) -> int:
        chat, _ = messages.chat_fields(convert_fields(MessagesFields, fields), fields)
        request = messages.chat.read(chat, ready)
        for call in request.on_prompt:
            call()
        return len(request.prompts[0])

    await http.json({"input_tokens": await app.read(http, messages, parse)})


class MessageEvents(Events):
    """Writes a chat's response as Anthropic's events or message: blocks of reasoning, text, tool calls."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(
            {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        )
        self.value |= {
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._arguments = ""
        self.blocks: list[dict[str, Any]] = self.value["content"]

    def begin(self, usage: dict[str, Any]) -> None:
        """Add the event `message_start` to the response. usage: token counts in the form of OpenAI's chat."""
        self.value["usage"] = _usage(usage)
        self.say("message_start", message=self.value)

    def take(self, delta: dict[str, Any]) -> None:
        """Add to the response the events for `delta`, the next part of the chat's message in OpenAI's form.

        delta: has `reasoning_content`, `content` or `tool_calls`.
        """
        if text := delta.get("reasoning_content"):
            self._open("thinking", thinking="", signature="")
            self.blocks[-1]["thinking"] += text
            self._add(type="thinking_delta", thinking=text)
        if text := delta.get("content"):
            self._open("text", text="")
            self.blocks[-1]["text"] += text
            self._add(type="text_delta", text=text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._open("tool_use", id=call["id"], name=call["function"]["name"], input={})
            self._arguments += call["function"]["arguments"]
            self._add(type="input_json_delta", partial_json=call["function"]["arguments"])

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """Add to the response the events that end its message.

        choice: the completion. reason: why it ended: `stop`, `length` or `tool_calls`. usage: token counts in
            the form of OpenAI's chat.
        """
        self._close()
        stop = (
            choice.stream.stop if reason == "stop" else None
        )  # behind a whole call that is why
        ended = {
            "stop_reason": "stop_sequence" if stop else REASONS[reason],
            "stop_sequence": stop,
        }
        self.value |= {**ended, "usage": _usage(usage)}
        self.say("message_delta", delta=ended, usage=self.value["usage"])
        self.say("message_stop")

    def _open(self, kind: str, **fields: Any) -> None:
        """Begin a content block of type `kind` in the response, unless its last block has this type.

        Each tool call (`tool_use`) is a block of its own. fields: of the new block.
        """
        if self.blocks and self.blocks[-1]["type"] == kind != "tool_use":
            return
        self._close()
        self.blocks.append({"type": kind, **fields})
        self.say(
            "content_block_start", index=len(self.blocks) - 1, content_block=self.blocks[-1]
        )

    def _add(self, **delta: Any) -> None:
        self.say("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _close(self) -> None:
        """End the response's last content block, if there is one.

        If the block is a tool call, its arguments are decoded; cut-off arguments become an empty `input`.
        """
        if not self.blocks:
            return
        if self._arguments:
            self.blocks[-1]["input"] = decode_written(self._arguments) or {}
            self._arguments = ""
        self.say("content_block_stop", index=len(self.blocks) - 1)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return one of Anthropic's tools as a tool of OpenAI's chat.

    Anthropic's built-in tools keep their type, so that the chat refuses or ignores them.
    """
    kind = "function" if tool.get("type") in (None, "custom") else tool["type"]
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": kind, "function": function | {"parameters": tool.get("input_schema")}}


def _messages(said: MessageParam, ignored: list[str]) -> list[dict[str, Any]]:
    """Return one message in Anthropic's form as a list of messages of a chat.

    Each result of a tool call becomes a message of its own, before the rest of the message.

    said: the message. ignored: the name of a field without effect is appended to it, once.
    """
    if isinstance(said.content, str):
        return [{"role": said.role, "content": said.content}]
    made, calls = list[dict[str, Any]](), list[dict[str, Any]]()
    texts, thoughts = list[dict[str, Any]](), list[str]()
    for block in said.content:
        match block.type:
            case "text":
                texts.append({"type": "text", "text": block.text})
            case "thinking":
                thoughts.append(block.thinking)
            case "tool_use":
                calls.append(call_of(block.id, block.name, block.input or {}))
            case "tool_result":
                answer = {"role": "tool", "tool_call_id": block.tool_use_id}
                made.append(answer | {"content": _result(block.content)})
                if block.is_error and _ERROR not in ignored:
                    ignored.append(_ERROR)
    message: dict[str, Any] = {"role": said.role, "content": texts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*made, message] if len(message) > 2 or texts else made


def _result(content: str | list[dict[str, Any]] | None) -> Any:
    """Return the content of a tool's result in a chat's form: a text, or a list of parts.

    content: Anthropic's. A part that only refers to a tool becomes a text with the tool's name.
    """
    if not isinstance(content, list):
        return content or ""
    return [
        {"type": "text", "text": str(part.get("tool_name", ""))}
        if part.get("type") == "tool_reference"
        else part
        for part in content
    ]


def _continued(messages: list[dict[str, Any]]) -> bool:
    """Return True if the output is to continue the last message: the assistant's, with text only.

    In that case, the parts of the last message are joined to one text, in place. False also if it is the only
    one. messages: of a chat.
    """
    if (
        len(messages) < 2
        or messages[-1]["role"] != "assistant"
        or "tool_calls" in messages[-1]
    ):
        return False
    messages[-1]["content"] = text_of(messages[-1]["content"])
    return bool(messages[-1]["content"])


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return token counts in Anthropic's form: input tokens found in the cache are counted separately.

    usage: the counts in the form of OpenAI's chat.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
