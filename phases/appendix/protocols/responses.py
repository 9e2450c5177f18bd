"""OpenAI's route `/v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from threading import Lock
from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.http.errors import ApiError, ErrorForm, check_count, wrong
from common.json_text import encode_json
from phases.appendix.protocols.translation import (
    NAMED_EVENT,
    Events,
    Messages,
    Translation,
    call_of,
    renamed,
)
from phases.appendix.tools.described import text_of
from serving.completion import Choice
from serving.endpoints import ChatEndpoint
from serving.http.request import HttpRequest
from serving.parsed import ParsedRequest

MOST_KEPT, MOST_BYTES = 1024, 32 << 20
"""Responses whose conversations are kept for `previous_response_id`, and bytes of all of them together."""
SHARE = 4
"""One client's conversations take a quarter of these at most."""


NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of fields here, by those of a chat."""


class InputItem(Struct):
    """An item of a conversation in the form of `/v1/responses`: message, tool call, result, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[dict[str, Any]] = ""


class ResponsesFields(Struct, kw_only=True):
    """Body of OpenAI's `POST /v1/responses`: input items, instructions, tools and settings."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: Literal[False] | None = False
    conversation: None = None
    prompt: None = None

    metadata: Any = None  # said again in the answer


class Conversations:
    """Stores the conversations of the newest responses, by the response's id; thread-safe.

    An id cannot be guessed.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Return the size of all stored conversations, in bytes."""
        return sum(len(data) for _, data in self._kept.values())

    def keep(self, id: str, messages: Messages, client: bytes = b"") -> None:
        """Store the conversation of response `id`, and drop the oldest ones beyond the limits.

        messages: of the conversation, the response included. client: who asked, such as an API key. If a
            client's conversations take too large a share, its own are dropped first.
        """
        data = msgspec.json.encode(messages)
        with self._lock:
            self._kept[id] = client, data
            own = [one for one, (whose, _) in self._kept.items() if whose == client]
            self._trim(own, SHARE)
            self._trim([*self._kept], 1)

    def find(self, id: str) -> Messages:
        """Return the messages of the conversation of response `id`, which then counts as the newest.

        Raises:
            ApiError: 404: it was never stored, or has been dropped.
        """
        with self._lock:
            if id not in self._kept:
                words = (
                    f"previous_response_id is {id[:100]!r}, which is not kept here, or no more"
                )
                code = "previous_response_not_found"
                raise ApiError(404, words, param="previous_response_id", code=code)
            self._kept.move_to_end(id)
            _, data = self._kept[id]
        found: Messages = msgspec.json.decode(data)
        return found

    def _trim(self, ids: list[str], share: int) -> None:
        """Drop the oldest of the conversations `ids` until the rest takes 1 / `share` of the limits or less.

        ids: from the oldest to the newest. The limits are `MOST_KEPT` conversations and `MOST_BYTES` bytes.
        """
        size = sum(len(self._kept[id][1]) for id in ids)
        for number, id in enumerate(ids):
            if len(ids) - number <= MOST_KEPT // share and size <= MOST_BYTES // share:
                return
            size -= len(self._kept.pop(id)[1])


class Responses(Translation):
    """OpenAI's route `/v1/responses`: translates its requests to chats, and their responses back."""

    fields = ResponsesFields
    names = NAMES
    form = ErrorForm(renamed(NAMES), NAMED_EVENT)
    threaded = True  # a short request may go on from a long conversation

    def __init__(self, chat: ChatEndpoint) -> None:
        super().__init__(chat)
        self.kept = Conversations()

    def translate(self, given: ResponsesFields, ignored: list[str]) -> dict[str, Any]:
        """Return the fields of the chat that is equivalent to a request.

        Its messages begin with those of the stored response that the request continues, if any.

        given: the route's fields. ignored: a list for the names of fields without effect; here none are
            added.

        Raises:
            ApiError: that response is not stored, or a field is wrong or too large.
        """
        most = self.chat.model.limits.max_schema_bytes
        again = {"metadata": given.metadata, "text": given.text, "tools": given.tools}
        for name, value in (again | {"tool_choice": given.tool_choice}).items():
            check_count(
                name, len(encode_json(value)), most, "bytes"
            )  # the answer says it again
        before = (
            self.kept.find(given.previous_response_id) if given.previous_response_id else []
        )
        said = (
            [InputItem(content=given.input)] if isinstance(given.input, str) else given.input
        )
        fields: dict[str, Any] = {
            "messages": _messages(before, said),
            "system": given.instructions,
            "parallel_tool_calls": given.parallel_tool_calls,
            "tools": [_tool(tool) for tool in given.tools or []],
            "tool_choice": given.tool_choice,
            "reasoning_effort": (given.reasoning or {}).get("effort"),
        }
        if given.max_output_tokens is not None:
            fields["max_tokens"] = given.max_output_tokens
        if (form := (given.text or {}).get("format")) is not None:
            if not isinstance(form, dict):
                raise wrong("text.format", "text.format must be an object")
            named = {"type": form.get("type"), "json_schema": form}
            fields["response_format"] = named if "schema" in form else form
        return fields

    def formatter(
        self, given: ResponsesFields, request: ParsedRequest, http: HttpRequest
    ) -> ResponseEvents:
        """Return the formatter that writes the chat's response as a response object, or its events.

        given: the route's fields. request: the chat that they were translated to. http: the HTTP request.
        """
        return ResponseEvents(self, given, request, http)


class ResponseEvents(Events):
    """Writes a chat's response as OpenAI's response object, or as the events of its stream.

    The object has items: reasoning, message and tool calls.

    kept: stores the conversation when the response has ended; None: it is not stored.
    """

    def __init__(
        self,
        route: Responses,
        given: ResponsesFields,
        request: ParsedRequest,
        http: HttpRequest,
    ) -> None:
        self.kept = None if given.store is False else route.kept
        self.messages: Messages = request.fields["conversation"]
        self._number = 0
        address = str((http.scope.get("client") or [""])[0]).encode()
        self._client = http.headers.get(b"authorization") or address
        replica = http.scope.get(
            "replica", b"here"
        ).decode()  # among several, by which it is found
        generation = request.generation
        form = (given.text or {}).get("format") or {"type": "text"}
        super().__init__(
            {
                "id": f"resp_{replica}_{secrets.token_hex(24)}",
                "object": "response",
                "created_at": int(time.time()),
                "status": "in_progress",
                "model": route.chat.model.name,
                "output": [],
                "instructions": given.instructions,
                "metadata": given.metadata,
                "previous_response_id": given.previous_response_id,
                "temperature": generation.temperature,
                "top_p": generation.top_p,
                "store": self.kept is not None,
                "text": {"format": form},
                "tools": given.tools or [],
                "tool_choice": given.tool_choice or "auto",
                "parallel_tool_calls": given.parallel_tool_calls is not False,
                "incomplete_details": None,
                "error": None,
                "usage": None,
            }
        )
        self.items: list[dict[str, Any]] = self.value["output"]

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """Return an event as the bytes of a server-sent event.

        kind: the event's type. event: its fields, to which a `sequence_number` is added.
        """
        number, self._number = self._number, self._number + 1
        return super().encode(kind, {"sequence_number": number, **event})

    def begin(self, usage: dict[str, Any]) -> None:
        """Add the stream's events `response.created` and `response.in_progress`. usage: not used."""
        self.say("response.created", response=self.value)
        self.say("response.in_progress", response=self.value)

    def take(self, delta: dict[str, Any]) -> None:
        """Add to the response the events for `delta`, the next part of the chat's message in OpenAI's form.

        delta: has `reasoning_content`, `content` or `tool_calls`.
        """
        if text := delta.get("reasoning_content"):
            self._text("reasoning", "reasoning_text", text, summary=[])
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
        """Add to the stream the events that end it, and store the conversation unless the client declined.

        choice: the completion. reason: why it ended: `stop`, `length` or `tool_calls`. usage: token counts in
            the form of OpenAI's chat.
        """
        cut = reason == "length"
        status = "incomplete" if cut else "completed"
        whole = choice.reader is not None and choice.reader.complete
        self._close("completed" if whole else status)  # a call behind it is left out
        self.value["status"] = status
        self.value["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.value["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        if self.kept is not None:
            said = msgspec.convert(self.items, list[InputItem])
            self.kept.keep(self.value["id"], _messages(self.messages, said), self._client)
        self.say(f"response.{status}", response=self.value)

    def _text(self, kind: str, part: str, text: str, **fields: Any) -> None:
        """Add `text` to the response's last item; begin a new item if the last one is not of type `kind`.

        part: type of the item's content, such as `output_text`. fields: of a new item.
        """
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
        """End the response's last item, if there is one. status: `completed` or `incomplete`."""
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
        """Add to the stream an event about the response's last item.

        kind: the event's type. event: its further fields.
        """
        self.say(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **event)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of `/v1/responses` as a tool of OpenAI's chat, which nests all but the type."""
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool.get("type"), "function": function}


def _messages(before: Messages, items: list[InputItem]) -> Messages:
    """Return a conversation as a chat's messages: `before`, and then those that `items` stand for.

    All that the assistant says in a row (reasoning, text, tool calls) becomes one message.
    """
    messages = list(before)

    def assistant() -> dict[str, Any]:
        """Return the assistant's message to which the next item belongs; append a new one if there is none.

        It is the last message, if that is the assistant's and not one of `before`.
        """
        if len(messages) == len(before) or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item.type:
            case "function_call":
                call = call_of(item.call_id, item.name, item.arguments)
                assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                )
            case "reasoning":
                thoughts = assistant().setdefault("reasoning_content", [])
                thoughts.append(text_of(item.content or item.summary))
            case _ if item.role == "assistant" and assistant()["content"] is None:
                assistant()["content"] = item.content
            case _:
                messages.append({"role": item.role, "content": item.content})
    for message in messages[len(before) :]:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return messages
