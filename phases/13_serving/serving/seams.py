"""Interfaces of what plugs into the server, of which the appendix has most: routes, fields, observers."""

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

    kinds: structs that declare the fields of its requests.
    source: the name of the field with the prompt.
    form: the JSON form of its errors.
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

        http: for its headers. fields: the decoded body. ready: the engine's sizes.

        Raises:
            ApiError: it could never be served.
            UserError: the same, because of the prompt.
        """


class FieldHandler(Protocol):
    """Interface of an object that reads some fields of requests, and adds their part to responses.

    names: of fields of requests and of messages, and roles; the handler reads requests that have one of
        these.
    """

    names: frozenset[str]

    @property
    def fields(self) -> type[Struct]:
        """Return the struct that declares the handler's fields; every field may be left out."""

    def read(self, given: Any, request: ParsedRequest) -> None:
        """Read the fields into `request`, in place, before the prompt is made. given: of type `fields`.

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
        """Return a function that gets a token's text, and whether it is the last, and returns the part of the
        text that is answer, in which stop strings are looked for; None if all text is.
        """

    @property
    def reasoning_tokens(self) -> int:
        """Return how many output tokens so far belong to reasoning, at least in part."""

    @property
    def complete(self) -> bool:
        """Return True if there are calls, and the answer has ended after a whole one."""

    def deltas(self, text: str, last: bool) -> list[Delta]:
        """Add the next text of the answer; return the parts that it adds to the message.

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
        """Return the bytes that end the stream of a group of completions."""

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
    """Watches the engine's steps in its process, and adds extra data to reports.

    due: whether it has something to add to the next report, so that one is sent although no step was run.
    """

    due: bool = False

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Receive a command for the observer: a `DrawEngine`, or an `AddRequest` that wants extra data.

        requests: those that an `AddRequest` has added to the engine.
        """
        return

    def write(self, step: StepReport) -> None:
        """Add extra data to the report `step`, in place; called while `due`."""
        return


class NullObserver(Observer):
    """An observer that adds nothing to reports; the appendix has one that draws the engine."""
