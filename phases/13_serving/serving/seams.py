"""Interfaces of what plugs into the server: routes, field handlers, formatters, sinks of tokens, observers.

Most of what implements them is in the appendix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from msgspec import Struct

    from common.events import Logprob
    from common.http.errors import ErrorForm
    from common.request import Request
    from serving.completion import Choice, ChoiceGroup, Piece
    from serving.http.request import HttpRequest
    from serving.messages import Command, Ready, StepReport
    from serving.parsed import ParsedRequest

Delta = dict[str, Any]
"""An addition to a message: `reasoning_content`, `content`, or `tool_calls` with a call or a part of one."""


# In the API process.


class Endpoint(Protocol):
    """Interface of an HTTP route that generates tokens.

    kinds: structs that declare the JSON fields of its requests.
    source: the name of the field with the prompt.
    form: how its errors are written as JSON.
    threaded: whether a thread parses its requests, however short they are.
    """

    kinds: Sequence[type[Struct]]
    source: str
    form: ErrorForm
    threaded: bool

    def parse(
        self, http: HttpRequest, fields: Mapping[str, Any], ready: Ready
    ) -> ParsedRequest:
        """Return an HTTP request for tokens, parsed and checked.

        http: for its headers. fields: the decoded JSON body. ready: the engine's sizes.

        Raises:
            ApiError: the request could never be served.
            UserError: the same, because of the prompt.
        """


class FieldHandler(Protocol):
    """Interface of an object that reads some fields of requests, and adds to responses what these ask for.

    names: fields of requests, fields of messages, and message roles. The handler is called for a request that
        has one of these.
    """

    names: frozenset[str]

    @property
    def fields(self) -> type[Struct]:
        """Return the struct that declares the handler's fields; every field may be left out."""

    def read(self, given: Any, request: ParsedRequest) -> None:
        """Read the handler's fields into `request`, in place, before its prompt is made.

        given: the fields, parsed: an instance of the struct `fields`.

        Raises:
            ApiError: a field asks for what cannot be served.
        """


class MessageReader(Protocol):
    """Interface of a reader that splits a completion's text, as it comes, into the parts of a chat message.

    calls: the tool calls found so far, as in the API's field `tool_calls`.
    """

    calls: list[dict[str, Any]]

    @property
    def answer(self) -> Callable[[str, bool], str] | None:
        """Return a function that finds the answer, the text in which stop strings are looked for.

        The function gets a token's text, and whether it is the last, and returns the part of that text which
        belongs to the answer (not to reasoning, for example). None: all text belongs to it.
        """

    @property
    def reasoning_tokens(self) -> int:
        """Return how many output tokens so far belong to reasoning, at least in part."""

    @property
    def complete(self) -> bool:
        """Return True if there are tool calls, and the completion has ended after a whole one; else False."""

    def deltas(self, text: str, last: bool) -> list[Delta]:
        """Read the completion's next text; return what it adds to the message, as dicts of message fields.

        last: the completion has ended.
        """


class Formatter(Protocol):
    """Interface of an object that formats the response to one request.

    headers: the HTTP headers of a streamed response.
    """

    headers: list[tuple[bytes, bytes]]

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the bytes of the events for `piece`, the next text of the completion `choice` in a stream.

        last: the completion has ended.
        """

    def end(self, group: ChoiceGroup) -> bytes:
        """Return the bytes that end the stream of a group of completions, such as an event `[DONE]`."""

    def body(self, group: ChoiceGroup) -> bytes:
        """Return the bytes of the whole response to a request that is not streamed, with a `group`."""


class Sink(Protocol):
    """Interface of an object that receives the tokens and the end of one completion."""

    def note(self, kind: str, values: list[Any]) -> None:
        """Receive extra data of the engine's observer about this completion, before the tokens of its step.

        kind: what the data is, such as "cached" tokens. values: a list, of a type that the kind decides.
        """

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """Receive the next token id. reason: why it is the last one ("stop" or "length"); None: it is not.

        logprob: its log-probability and those of alternatives; None unless they were asked for.
        """

    def end(self, reason: str, message: str) -> None:
        """Receive the end of a completion that gets no further token.

        reason: "stop", "length", "abort", "refused", "nan", "error" or "died". message: a sentence about it.
        """


# In the engine process.


class Observer(Protocol):
    """Watches the engine's steps in its process, and adds extra data to reports for the API process.

    due: whether it has something to add to the next report, so that one is sent although no step was run.
    """

    due: bool = False

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Receive a command for the observer: a `DrawEngine`, or an `AddRequest` that wants extra data.

        requests: the engine's, which that `AddRequest` has made; empty for a `DrawEngine`.
        """
        return

    def write(self, step: StepReport) -> None:
        """Add extra data to the report `step`, in place; called while `due`."""
        return


class NullObserver(Observer):
    """An observer that adds nothing to reports; the appendix has one that draws the engine."""
