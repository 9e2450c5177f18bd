"""OpenAI's `/v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Any, Literal

import msgspec
from msgspec import Struct

from phases.appendix.api.endpoints import WideChat
from phases.appendix.protocols.translation import Events, Messages, NamedErrors, Translation
from phases.appendix.tools.described import text_of
from serving.completion import Choice
from serving.http.errors import ApiError, wrong
from serving.http.exchange import Exchange
from serving.http.schema import Generation

MOST_KEPT, MOST_BYTES = 1024, 32 << 20
"""Responses whose conversations are kept for `previous_response_id`, and bytes of all of them together."""


class InputItem(Struct):
    """A message, a call, its answer, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[dict[str, Any]] = ""


class ResponsesRequest(Generation, kw_only=True, forbid_unknown_fields=False):
    """`POST /v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: Literal[False] | None = False
    conversation: None = None
    prompt: None = None

    metadata: Any = None  # said again in the answer


class Conversations:
    """Conversations of the newest responses, by ids that cannot be guessed.

    size: bytes of all.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.size = 0

    def keep(self, id: str, messages: Messages) -> None:
        """Keep one; the oldest go where there are too many."""
        data = self._kept[id] = msgspec.json.encode(messages)
        self.size += len(data)
        while len(self._kept) > MOST_KEPT or self.size > MOST_BYTES:
            self.size -= len(self._kept.popitem(last=False)[1])

    def find(self, id: str) -> Messages:
        """Return one. Raises `ApiError` if it is not here, or no more."""
        if id not in self._kept:
            words = f"previous_response_id is {id[:100]!r}, which is not kept here, or no more"
            raise ApiError(
                404, words, param="previous_response_id", code="previous_response_not_found"
            )
        self._kept.move_to_end(id)
        found: Messages = msgspec.json.decode(self._kept[id])
        return found


class Responses(Translation):
    """`/v1/responses`."""

    body = ResponsesRequest
    most_temperature = WideChat.most_temperature
    form = NamedErrors(
        {
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "response_format": "text.format",
        }
    )

    def __init__(self, chat: WideChat) -> None:
        super().__init__(chat)
        self.kept = Conversations()

    def translate(self, request: ResponsesRequest) -> dict[str, Any]:
        """See `Translation`."""
        before = (
            self.kept.find(request.previous_response_id)
            if request.previous_response_id
            else []
        )
        said = (
            [InputItem(content=request.input)]
            if isinstance(request.input, str)
            else request.input
        )
        fields: dict[str, Any] = {
            "messages": _messages(before, said),
            "system": request.instructions or None,
        }
        fields["parallel_tool_calls"] = request.parallel_tool_calls
        if request.tools:
            fields["tools"] = [
                {"type": tool.get("type"), "function": tool} for tool in request.tools
            ]
        choice = request.tool_choice
        fields["tool_choice"] = (
            choice if not isinstance(choice, dict) else choice | {"function": choice}
        )
        if request.max_output_tokens is not None:
            fields["max_tokens"] = request.max_output_tokens
        if (form := (request.text or {}).get("format")) is not None:
            if not isinstance(form, dict):
                raise wrong("text.format", "text.format must be an object")
            named = {"type": form.get("type"), "json_schema": form}
            fields["response_format"] = named if "schema" in form else form
        return fields

    def answer(self, exchange: Exchange, request: Any) -> ResponseEvents:
        """See `Endpoint`."""
        return ResponseEvents(self, request)


class ResponseEvents(Events):
    """Builds a response of items: reasoning, a message, calls.

    kept: where the conversation goes when it has ended; None: it is not kept.
    """

    def __init__(self, of: Responses, request: ResponsesRequest) -> None:
        self.kept = of.kept if request.store is not False else None
        self.messages = of.messages
        self._number = 0
        repeated = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
        super().__init__(of, {name: getattr(request, name) for name in repeated})
        form = (request.text or {}).get("format") or {"type": "text"}
        self.value |= {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "model": of.model,
        }
        self.value |= {"created_at": int(time.time()), "status": "in_progress", "output": []}
        self.value |= {
            "store": self.kept is not None,
            "text": {"format": form},
            "tools": request.tools or [],
        }
        self.value |= {
            "tool_choice": request.tool_choice or "auto",
            "error": None,
            "usage": None,
        }
        self.value |= {"parallel_tool_calls": request.parallel_tool_calls is not False}
        self.value |= {"incomplete_details": None}
        self.items: list[dict[str, Any]] = self.value["output"]

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """See `Events`. Events are numbered."""
        number, self._number = self._number, self._number + 1
        return super().encode(kind, {"sequence_number": number, **event})

    def begin(self, usage: dict[str, Any]) -> None:
        """See `Events`."""
        self.say("response.created", response=self.value)
        self.say("response.in_progress", response=self.value)

    def take(self, delta: dict[str, Any]) -> None:
        """See `Events`."""
        if thought := delta.get("reasoning_content"):
            self._text("reasoning", "reasoning_text", thought, summary=[])
        if text := delta.get("content"):
            self._text("message", "output_text", text, role="assistant")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._open(
                    "function_call",
                    call_id=call["id"],
                    name=call["function"]["name"],
                    arguments="",
                )
            self.items[-1]["arguments"] += call["function"]["arguments"]
            self._say(
                "response.function_call_arguments.delta", delta=call["function"]["arguments"]
            )

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """See `Events`."""
        cut = reason == "length"
        self._close("incomplete" if cut else "completed")
        self.value |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self.kept is not None:
            self.kept.keep(
                self.value["id"],
                _messages(self.messages, msgspec.convert(self.items, list[InputItem])),
            )
        self.say(f"response.{self.value['status']}", response=self.value)

    def _text(self, kind: str, part: str, text: str, **fields: Any) -> None:
        """Add to the text of an item, which is begun unless the last one is of its kind."""
        if not self.items or self.items[-1]["type"] != kind:
            self._open(kind, **fields, content=[])
            made = {"type": part, "text": "", "annotations": [], "logprobs": []}
            self.items[-1]["content"].append(made)
            self._say(
                "response.content_part.added",
                content_index=0,
                part=self.items[-1]["content"][0],
            )
        self.items[-1]["content"][0]["text"] += text
        self._say(f"response.{part}.delta", content_index=0, delta=text, logprobs=[])

    def _open(self, kind: str, **fields: Any) -> None:
        self._close("completed")
        prefix = {"function_call": "fc", "message": "msg", "reasoning": "rs"}[kind]
        item = {
            "id": f"{prefix}_{secrets.token_hex(12)}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self.items.append(item)
        self.say("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self, status: str) -> None:
        """End the last item."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            self._say("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            part = item["content"][0]
            self._say(
                f"response.{part['type']}.done",
                content_index=0,
                text=part["text"],
                logprobs=[],
            )
            self._say("response.content_part.done", content_index=0, part=part)
        self.say("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _say(self, kind: str, **event: Any) -> None:
        """Add an event about the last item."""
        self.say(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **event)


def _messages(before: Messages, items: list[InputItem]) -> Messages:
    """Return a conversation and what follows it: all that the assistant says in a row is one message."""
    messages = list(before)

    def assistant() -> dict[str, Any]:
        """Return the message that goes on."""
        if len(messages) == len(before) or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item.type:
            case "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                )
            case "reasoning":
                assistant()["reasoning_content"] = text_of(item.content or item.summary)
            case _ if item.role == "assistant" and assistant()["content"] is None:
                assistant()["content"] = item.content
            case _:
                messages.append({"role": item.role, "content": item.content})
    return messages
