"""The seam of this entry: a request becomes a chat's, and the chunks of the chat become events.

A protocol says three things: `translate`, from its request to the fields of a chat; its `Events`, from what
is new in the chat to its own; and its form of errors. Everything between them is the chat's path:
limits, queue, deadlines, metrics, leavers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from math import inf
from typing import Any, Self

import msgspec

from common.errors import UserError
from phases.appendix.api.answers import WideChatAnswer
from phases.appendix.api.endpoints import WideChat
from phases.appendix.api.schema import ChatRequest
from phases.appendix.tools.described import Message, with_system
from serving.completion import Choice, ChoiceGroup, Order, Piece
from serving.endpoints import Endpoint
from serving.http.answers import Answer, usage
from serving.http.errors import ApiError, ErrorForm, wrong
from serving.http.exchange import Exchange
from serving.http.schema import Generation
from serving.messages import Ready

Messages = list[Message]
_json = msgspec.json.Encoder().encode


class NamedErrors(ErrorForm):
    """Errors in OpenAI's form under the names that a chat's fields have in a protocol."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def body(self, error: ApiError) -> dict[str, Any]:
        """See `ErrorForm`."""
        body = error.body
        if error.param is not None and error.param in self.names:
            field = self.names[error.param]
            body["error"] |= {
                "param": field,
                "message": re.sub(f"^{error.param}", field, str(error)),
            }
        return body

    def event(self, body: bytes) -> bytes:
        """See `ErrorForm`."""
        return b"event: error\ndata: " + body + b"\n\n"


class Events(Answer):
    """The answer to a chat as a protocol's events; one that is not streamed is built of the same news.

    value: the whole answer, as far as it is known.
    """

    def __init__(self, of: Translation, value: dict[str, Any]) -> None:
        about = (of.prefix, of.model, of.prompts.tokenizer, of.request)
        super().__init__(*about)
        self.chat, self.value = WideChatAnswer(*about), value
        self._said: list[bytes] = []

    def begin(self, usage: dict[str, Any]) -> None:
        """Say that an answer begins; `usage` is a chat's."""

    def take(self, delta: dict[str, Any]) -> None:
        """Take in a chat's delta: `reasoning_content`, `content` or `tool_calls`."""
        raise NotImplementedError

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """Say why it has ended: `stop`, `length` or `tool_calls`."""
        raise NotImplementedError

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """Return an event as it is sent."""
        return b"event: %s\ndata: " % kind.encode() + _json({"type": kind, **event}) + b"\n\n"

    def say(self, kind: str, **event: Any) -> None:
        """Add an event, as its parts are now: they change later."""
        self._said.append(self.encode(kind, event))

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        if not piece.start:
            self.begin(usage(choice.group))
        for delta in self.chat.deltas(choice, piece, last):
            self.take(delta)
        if last:
            self.finish(choice, self.chat.reason(choice) or "stop", usage(choice.group))
        said, self._said = self._said, []
        return b"".join(said)

    async def body(self, group: ChoiceGroup) -> bytes:
        """See `Answer`."""
        (choice,) = group.choices
        self.chunk(choice, Piece(choice.text, 0, len(choice.tokens)), True)
        return _json(self.value)

    def end(self, group: ChoiceGroup) -> bytes:
        """See `Answer`. All is said."""
        return b""


class Translation(Endpoint):
    """A request of another protocol, which is translated once and takes the chat's path.

    request, messages: the chat, and its messages without `system`.
    """

    request: ChatRequest
    messages: Messages
    most_temperature = inf

    def __init__(self, chat: WideChat) -> None:
        super().__init__(chat.prompts, chat.model, chat.limits)
        self.chat = chat

    def of(self, request: Any) -> Self:
        """See `Endpoint`."""
        super().of(request)
        made = copy(self)
        if request.n not in (None, 1):
            raise wrong("n", f"n is {request.n}, but must be 1 here")
        same = {name: getattr(request, name) for name in Generation.__struct_fields__}
        try:
            fields = self.translate(request)
            made.messages, system = fields["messages"], fields.pop("system", None)
            if system is not None:
                fields["messages"] = with_system(made.messages, system)
        except UserError as error:
            raise wrong("messages", str(error)) from None
        made.request = ChatRequest(**(same | {"stream_options": None} | fields))
        return made

    def translate(self, request: Any) -> dict[str, Any]:
        """Return the fields of a chat that a request means, and `system`, a text for its system message.

        Raises:
            ApiError: it means none.
        """
        raise NotImplementedError

    async def orders(self, exchange: Exchange, request: Any, ready: Ready) -> list[Order]:
        """See `Endpoint`."""
        return await self.chat.orders(exchange, self.request, ready)

    def refusal(self, message: str, request: Any, order: Order | None = None) -> ApiError:
        """See `Endpoint`."""
        return self.chat.refusal(message, self.request, order)
