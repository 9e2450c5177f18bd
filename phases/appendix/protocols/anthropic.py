"""Anthropic's `/v1/messages`: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Struct

from phases.appendix.protocols.translation import Events, NamedErrors, Translation
from phases.appendix.tools.described import text_of
from serving.app import App
from serving.completion import Choice
from serving.http.errors import ApiError, wrong
from serving.http.exchange import Exchange
from serving.http.schema import Generation

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(Struct):
    """A part of a message: a text, reasoning, a call, or the answer to one."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None


class MessageParam(Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolChoice(Struct):
    """The calls that have to be made, or may be."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class MessagesRequest(Generation, kw_only=True, forbid_unknown_fields=False):
    """`POST /v1/messages`, Anthropic's."""

    messages: list[MessageParam]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class AnthropicErrors(NamedErrors):
    """Errors as Anthropic's clients read them."""

    def body(self, error: ApiError) -> dict[str, Any]:
        """See `ErrorForm`."""
        return {"type": "error", **super().body(error)}


class Messages(Translation):
    """`/v1/messages`."""

    body = MessagesRequest
    form = AnthropicErrors({"stop": "stop_sequences", "response_format": "output_config"})

    def translate(self, request: MessagesRequest) -> dict[str, Any]:
        """See `Translation`."""
        messages = [made for said in request.messages for made in _messages(said)]
        fields: dict[str, Any] = {
            "messages": messages,
            "stop": request.stop_sequences or request.stop,
        }
        if request.system:
            fields["system"] = text_of(request.system)
        if request.tools:
            fields["tools"] = [_tool(tool) for tool in request.tools]
        if choice := request.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(
                choice.type, choice.type
            )
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if request.thinking is not None:
            fields["chat_template_kwargs"] = {
                "enable_thinking": request.thinking.get("type") != "disabled"
            }
        if isinstance(form := (request.output_config or {}).get("format"), dict):
            fields["response_format"] = form
        return fields

    def answer(self, exchange: Exchange, request: Any) -> MessageEvents:
        """See `Endpoint`."""
        if request.max_tokens is None:
            raise wrong("max_tokens", "max_tokens is missing, but must be given")
        return MessageEvents(self)


async def count(app: App, messages: Messages, exchange: Exchange) -> None:
    """Answer with the number of a prompt's tokens."""
    exchange.form = messages.form
    request, ready = await app.begin(exchange, MessagesRequest)
    ids, _ = await messages.chat.prompt(exchange, messages.of(request).request, ready)
    await exchange.json({"input_tokens": len(ids)})


class MessageEvents(Events):
    """Builds a message of blocks: reasoning, text, calls."""

    def __init__(self, of: Messages) -> None:
        super().__init__(
            of, {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        )
        self.value |= {
            "model": of.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._arguments = ""
        self.blocks: list[dict[str, Any]] = self.value["content"]

    def begin(self, usage: dict[str, Any]) -> None:
        """See `Events`."""
        self.value["usage"] = _usage(usage)
        self.say("message_start", message=self.value)

    def take(self, delta: dict[str, Any]) -> None:
        """See `Events`."""
        if thought := delta.get("reasoning_content"):
            self._open("thinking", thinking="", signature="")
            self.blocks[-1]["thinking"] += thought
            self._add(type="thinking_delta", thinking=thought)
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
        """See `Events`."""
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
        """Begin a block, unless the last one is of this kind."""
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
        """End the last block. A call that was cut has no input."""
        if not self.blocks:
            return
        if self._arguments:
            with suppress(msgspec.DecodeError):
                self.blocks[-1]["input"] = msgspec.json.decode(self._arguments)
            self._arguments = ""
        self.say("content_block_stop", index=len(self.blocks) - 1)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as a chat's; one of Anthropic's own keeps its type, which is refused."""
    kind = "function" if tool.get("type") in (None, "custom") else tool["type"]
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": kind, "function": function | {"parameters": tool.get("input_schema")}}


def _messages(said: MessageParam) -> list[dict[str, Any]]:
    """Return a message as a chat's: answers to calls are messages of their own there."""
    if isinstance(said.content, str):
        return [{"role": said.role, "content": said.content}]
    made: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": said.role, "content": texts}
    for block in said.content:
        match block.type:
            case "text":
                texts.append({"type": "text", "text": block.text})
            case "thinking":
                message["reasoning_content"] = (
                    message.get("reasoning_content", "") + block.thinking
                )
            case "tool_use":
                function = {"name": block.name, "arguments": block.input}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "tool_result":
                answer = {"role": "tool", "tool_call_id": block.tool_use_id}
                made.append(answer | {"content": block.content or ""})
    return [*made, message] if len(message) > 2 or texts else made


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in Anthropic's words, where tokens of the cache are counted apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
