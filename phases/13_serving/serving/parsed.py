"""A request for tokens that has been read: the prompts and settings for the engine, and the answer's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from common.http.errors import ApiError, wrong
from common.sampling.params import SamplingParams
from serving.http.schema import GenerationFields
from serving.messages import Ready

if TYPE_CHECKING:
    from msgspec import Struct

    from serving.completion import Choice, ChoiceGroup, Piece

DEFAULTS = SamplingParams()
Delta = dict[str, Any]
"""An addition to a message: `reasoning_content`, `content`, or `tool_calls` with a call or a part of one."""


class MessageReader(Protocol):
    """Interface of what makes a chat message of a completion's text, as it comes, with more than content.

    calls: the tool calls found so far, as in the API's field `tool_calls`.
    """

    calls: list[dict[str, Any]]

    @property
    def answer(self) -> Callable[[str, bool], str] | None:
        """Return a function that gets the text of each token, and whether it is the last. It returns what of
        it belongs to the answer, in which stop strings are looked for. None: all does.
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
    """Interface of what formats the response to one request.

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
        """Return the bytes of the whole response, for a request that is not streamed. group: its
        completions.
        """


@dataclass
class ParsedRequest:
    """One HTTP request for tokens, with defaults where the client sent nothing; `params` are its final
    settings.

    Field handlers change it while it is parsed: `sampling` takes settings of `SamplingParams`, `messages`
    and `variables` are what the chat template sees, `on_prompt` is called once the prompts are token ids.

    fields, generation: all fields as the client has sent them, and those that every request may have.
    prompts: token ids of each.
    ready: the engine's sizes. source: the name of the field with the prompt.
    options: further fields of the command `AddRequest` by which the engine gets each prompt.
    seconds: time limit of the whole request.
    names: the client's name of a setting or of `grammar`, where it differs.
    constrained: whether the output follows a grammar from its first token, so that it has no reasoning.
    explain: puts the engine's refusal of a grammar into the client's words.
    headers: of the response.
    shown: ids of special tokens that belong to the text.
    prompt_only: whether the one token that the engine makes of each prompt is of no interest.
    reader: makes what reads each completion's text if a chat message has more than content; else None.
    details: functions that return JSON fields beside the text of a piece. A thread calls them for the first
        piece, which may have those of a whole prompt.
    """

    generation: GenerationFields
    fields: Mapping[str, Any]
    sampling: dict[str, Any]
    ready: Ready
    source: str = "prompt"
    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams = DEFAULTS
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = inf
    names: dict[str, str] = field(default_factory=dict)
    constrained: bool = False
    explain: Callable[[str], str] = lambda message: message
    on_prompt: list[Callable[[], None]] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    shown: frozenset[int] = frozenset()
    prompt_only: bool = False
    reader: Callable[[], MessageReader] | None = None
    details: list[Callable[[Choice, Piece], dict[str, Any]]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    formatter: Formatter = field(init=False)

    def refusal(self, message: str) -> ApiError:
        """Return the error of a request that cannot be served, with the field's name as the client calls it.

        message: what is wrong: about a setting, whose name it begins with, or about a prompt.
        """
        setting = message.partition(" ")[0]
        if setting == "grammar":
            message = self.explain(message)
        name = self.names.get(setting, setting)
        if message.startswith(setting + " "):
            message = name + message[len(setting) :]
        if name in self.fields or "the prompt " not in message:
            return wrong(name if name in self.fields else None, message)
        code = "context_length_exceeded" if "must have at most" in message else None
        return ApiError(400, message, param=self.source, code=code)


class FieldHandler(Protocol):
    """Interface of what reads some fields of requests, and adds their part to the responses.

    names: of fields of requests and of messages, and roles; the handler reads requests that have one of
        these.
    """

    names: frozenset[str]

    @property
    def fields(self) -> type[Struct]:
        """Return the struct that declares the handler's fields; every field may be left out."""

    def read(self, given: Any, request: ParsedRequest) -> None:
        """Read the fields into `request`, in place, before the prompt is made. given: an instance of
        `fields`.

        Raises:
            ApiError: a field asks for what cannot be served.
        """
