"""The seam of this entry: a request becomes a chat's, and the chat's updates become a protocol's events.

A protocol says three things: `translate`, from its fields to those of a chat; its `Events`, from the deltas
of the chat to its own; and its form of errors. Everything between them is the chat's path: handlers of
fields, limits, queue, deadlines, metrics, leavers.
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

    A response that is not streamed is built by the same methods, so the two cannot differ.

    value: the whole response, as far as it is known; methods change it.
    """

    headers = EVENTS

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value
        self._said: list[bytes] = []

    def begin(self, usage: dict[str, Any]) -> None:
        """Add the events with which a response begins. usage: token counts in the form of OpenAI's chat."""

    def take(self, delta: dict[str, Any]) -> None:
        """Add the events of the next part of a chat's message.

        delta: OpenAI's: has `reasoning_content`, `content` or `tool_calls`.
        """
        raise NotImplementedError

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """Add the events with which a response ends.

        choice: the completion. reason: `stop`, `length` or `tool_calls`. usage: token counts in the form of
            OpenAI's chat.
        """
        raise NotImplementedError

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """Return an event as the bytes that are sent: here a server-sent event. kind: its type. event:
        its fields.
        """
        return (
            b"event: %s\ndata: " % kind.encode()
            + encode_json({"type": kind, **event})
            + b"\n\n"
        )

    def say(self, kind: str, **event: Any) -> None:
        """Add an event to those that the next `chunk` returns; its fields are encoded now, since they
        change later.

        kind: its type.
        """
        self._said.append(self.encode(kind, event))

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the bytes of the events for a piece of a streamed completion. last: the completion has
        ended.
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
        """Return the whole response as JSON, for a request that is not streamed."""
        (choice,) = group.choices
        self.chunk(choice, choice.take(), True)
        return encode_json(self.value)

    def end(self, group: ChoiceGroup) -> bytes:
        """Return no bytes: the last chunk has ended the stream."""
        return b""


Shape = Callable[[dict[str, Any]], dict[str, Any]]


def renamed(
    names: Mapping[str, str], shape: Shape = lambda body: body
) -> Callable[[ApiError], dict[str, Any]]:
    """Return a function that makes the JSON object of an error in another protocol's words.

    names: the protocol's name of a field, by OpenAI's name, where they differ. shape: turns OpenAI's error
        object into the protocol's.
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

    fields: the struct that declares the protocol's request fields.
    names: the protocol's name of a field, by OpenAI's name, where they differ.
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
        """Return a request's body, translated to a chat, parsed and checked.

        fields: the body. ready: the engine's sizes and limits.

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
        """Return the fields of the chat that a request means, and the names of its fields that have no
        effect.

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
        """Return the fields of the chat that a request means, and `system`, a text for its system message.

        given: the body as the protocol's struct. ignored: gets the names of fields that have no effect.

        Raises:
            ApiError: the request cannot be said as a chat.
        """
        raise NotImplementedError

    def formatter(self, given: Any, request: ParsedRequest, http: HttpRequest) -> Events:
        """Return the formatter that writes the response of a translated request in this protocol's form.

        given: the body as the protocol's struct. request: the chat. http: the HTTP request.
        """
        raise NotImplementedError


def call_of(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an earlier tool call of another protocol as an entry of a chat's `tool_calls`.

    id: of the call. name: of the function. arguments: an object, or its JSON.
    """
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
