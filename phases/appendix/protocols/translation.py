"""Base classes of other protocols' routes: a request becomes a chat, the chat's response is translated back.

A protocol defines three things: `translate`, from its fields to those of a chat; its `Events`, from the parts
of the chat's message to its own events; and its form of errors. All else is the chat's code: handlers of
fields, limits, queue, deadlines, metrics, clients that disconnect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from common.http.errors import ApiError, ErrorForm, error_body, wrong
from common.json_text import convert_fields, encode_json
from phases.appendix.api.scheduling import SchedulingFields
from phases.appendix.tools.described import Message, with_system
from serving.completion import Choice, ChoiceGroup, Piece
from serving.endpoints import ChatEndpoint
from serving.formatter import usage
from serving.http.request import EVENTS, HttpRequest
from serving.http.schema import GenerationFields
from serving.messages import Ready
from serving.parsed import ParsedRequest

Messages = list[Message]
NAMED_EVENT = b"event: error\ndata: %s\n\n"


class TemplateFields(Struct, kw_only=True):
    """Request field `chat_template_kwargs` (vLLM's): variables of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None


EVERYWHERE: list[type[Struct]] = [GenerationFields, SchedulingFields, TemplateFields]
"""Structs of fields that a chat of any protocol may have."""
PASSED = {name for kind in EVERYWHERE for name in kind.__struct_fields__}
PASSED -= {"stream_options", "n"}
"""Fields of a chat that every protocol takes under the same names."""


class Events:
    """Base class of formatters that write a chat's response as another protocol's events.

    A response that is not streamed is built by the same methods, so both have the same content.

    value: the whole response, as far as it is known; methods change it.
    """

    headers = EVENTS

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value
        self._said: list[bytes] = []

    def begin(self, usage: dict[str, Any]) -> None:
        """Add to the response the events with which it begins, if any.

        usage: token counts in the form of OpenAI's chat.
        """

    def take(self, delta: dict[str, Any]) -> None:
        """Add to the response the events for `delta`, the next part of the chat's message in OpenAI's form.

        delta: has `reasoning_content`, `content` or `tool_calls`.
        """
        raise NotImplementedError

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """Add to the response the events with which it ends.

        choice: the completion. reason: why it ended: `stop`, `length` or `tool_calls`. usage: token counts in
            the form of OpenAI's chat.
        """
        raise NotImplementedError

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """Return an event as the bytes that are sent, here a server-sent event.

        kind: the event's type. event: its fields.
        """
        return (
            b"event: %s\ndata: " % kind.encode()
            + encode_json({"type": kind, **event})
            + b"\n\n"
        )

    def say(self, kind: str, **event: Any) -> None:
        """Add an event to those whose bytes the next `chunk` returns.

        Its fields are encoded now, since the objects in them change later.

        kind: the event's type. event: its fields.
        """
        self._said.append(self.encode(kind, event))

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the bytes of all events for `piece`, the next text of a streamed completion.

        choice: the completion. last: the completion has ended.
        """
        if not piece.start:
            self.begin(usage(choice.group))
        for delta in choice.deltas(piece.text, last):
            self.take(delta)
        if last:
            self.finish(choice, choice.finish_reason or "stop", usage(choice.group))
        said, self._said = self._said, []
        return b"".join(said)

    def body(self, group: ChoiceGroup) -> bytes:
        """Return the whole response as JSON, for a request that is not streamed.

        group: the request's completions, of which there is one.
        """
        (choice,) = group.choices
        self.chunk(choice, choice.take(), True)
        return encode_json(self.value)

    def end(self, group: ChoiceGroup) -> bytes:
        """Return no bytes: the last chunk of the one completion has ended the stream. group: not used."""
        return b""


Shape = Callable[[dict[str, Any]], dict[str, Any]]


def renamed(
    names: Mapping[str, str], shape: Shape = lambda body: body
) -> Callable[[ApiError], dict[str, Any]]:
    """Return a function that makes the JSON object of an `ApiError`, with another protocol's field names.

    names: OpenAI's name of a field -> the protocol's, where they differ. shape: turns OpenAI's error object
        into the protocol's.
    """

    def body(error: ApiError) -> dict[str, Any]:
        made = error_body(error)
        said = made["error"]
        if (param := said["param"]) in names:
            said["message"] = re.sub(rf"^{param}\b", names[param], said["message"])
            said["param"] = names[param]
        return shape(made)

    return body


class Translation:
    """Base class of endpoints of other protocols, whose requests become chats of OpenAI's form.

    chat: the endpoint of chats. fields: the struct that declares the protocol's request fields.
    names: OpenAI's name of a field -> the protocol's, where they differ.
    """

    fields: type[Struct]
    names: Mapping[str, str]
    form: ErrorForm
    source = "messages"
    threaded = False

    def __init__(self, chat: ChatEndpoint) -> None:
        self.chat = chat
        self.kinds: Sequence[type[Struct]] = [*EVERYWHERE, self.fields]

    def parse(
        self, http: HttpRequest, fields: Mapping[str, Any], ready: Ready
    ) -> ParsedRequest:
        """Return a request, translated to a chat, parsed and checked.

        http: the HTTP request. fields: its body. ready: the engine's sizes and limits.

        Raises:
            ApiError: a field is wrong.
        """
        given: Any = convert_fields(self.fields, fields)
        if fields.get("n") not in (None, 1):
            raise wrong("n", f"n is {str(fields['n'])[:20]}, but must be 1 here")
        translated, ignored = self.chat_fields(given, fields)
        if fields.get("stream_options") is not None:  # a chat's, whose chunks differ
            ignored.append("stream_options")
        request = self.chat.read(translated, ready)
        self.chat.model.finish(request)
        said = (self.names.get(name, name) for name in request.ignored)
        request.ignored = [*said, *ignored]
        request.formatter = self.formatter(given, request, http)
        return request

    def chat_fields(
        self, given: Any, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return (fields of the chat that is equivalent to a request, names of its fields without effect).

        given: the body as the protocol's struct. fields: the body as a dictionary.
        """
        passed = {name: value for name, value in fields.items() if name in PASSED}
        ignored = list[str]()
        made = self.translate(given, ignored)
        if own := made.get("chat_template_kwargs"):
            more = convert_fields(TemplateFields, fields).chat_template_kwargs or {}
            made["chat_template_kwargs"] = more | own
        passed |= made
        passed["conversation"] = passed["messages"]
        if system := passed.pop("system", None):
            passed["messages"] = with_system(passed["messages"], system, first=True)
        return passed, ignored

    def translate(self, given: Any, ignored: list[str]) -> dict[str, Any]:
        """Return the fields of the chat that is equivalent to a request.

        The field `system`, which a chat does not have, is a text for its system message.

        given: the body as the protocol's struct. ignored: a list to which the names of fields without effect
            are appended.

        Raises:
            ApiError: the request cannot be expressed as a chat.
        """
        raise NotImplementedError

    def formatter(self, given: Any, request: ParsedRequest, http: HttpRequest) -> Events:
        """Return the formatter that writes the chat's response in this protocol's form.

        given: the body as the protocol's struct. request: the chat that it was translated to. http: the HTTP
            request.
        """
        raise NotImplementedError


def call_of(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an earlier tool call, from another protocol's message, as an entry of a chat's `tool_calls`.

    id: of the call. name: of the function. arguments: an object, or its JSON.
    """
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
