"""A parsed HTTP request for tokens: the prompts and settings for the engine, and the form of its response."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from common.http.errors import ApiError, bad_prompt, wrong
from common.sampling.params import MAX_INT, SamplingParams
from serving.http.schema import GenerationFields
from serving.messages import Ready

if TYPE_CHECKING:
    from serving.completion import Choice, Piece
    from serving.seams import Formatter, MessageReader

DEFAULTS = SamplingParams()


def listed(names: list[str]) -> bytes:
    """Return the first 16 names, cut to 100 characters each, comma-separated, as an ASCII header value."""
    text = ", ".join(name[:100] for name in names[:16])
    return re.sub("[^ -~]", "?", text).encode()


@dataclass
class ParsedRequest:
    """One HTTP request for tokens; fields that the client did not send have defaults.

    Field handlers change it while it is parsed: `sampling` collects settings of `SamplingParams`, `messages`
    and `variables` are what the chat template sees, `on_prompt` is called once the prompts are token ids.

    fields: all JSON fields that the client has sent. generation: those that all requests for tokens may have.
    prompts: token ids of each. params: the final sampling settings.
    ready: the engine's sizes. source: the name of the field with the prompt, such as "messages".
    listed: whether that field is a list of prompts. place: index in it of the prompt that errors are about.
    default_tokens: `max_tokens` where the request does not say, if there is room for so many.
    options: further fields of the command `AddRequest` by which the engine gets each prompt.
    seconds: time limit of the whole request.
    names: our name of a setting, or "grammar" -> the client's name of it, where it differs.
    constrained: whether the output follows a grammar from its first token, so that it has no reasoning.
    explain: puts the engine's refusal of a grammar into the client's words.
    headers: of the response. ignored: names of fields without effect, listed in one of these headers.
    shown: ids of special tokens that belong to the text.
    mark: text of the output from which on no stop string counts, such as the beginning of a tool call.
    prompt_only: whether only the prompts matter; the one token made of each is then dropped.
    reader: makes the `MessageReader` of each completion, if a chat message has more than content; else None.
    details: functions that return JSON fields beside the text of a piece. A thread may call them.
    formatter: makes the response.
    """

    generation: GenerationFields
    fields: Mapping[str, Any]
    sampling: dict[str, Any]
    ready: Ready
    source: str = "prompt"
    listed: bool = False
    place: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams = DEFAULTS
    default_tokens: int = MAX_INT
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = inf
    names: dict[str, str] = field(default_factory=dict)
    constrained: bool = False
    explain: Callable[[str], str] = lambda message: message
    on_prompt: list[Callable[[], None]] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    shown: frozenset[int] = frozenset()
    mark: str = ""
    prompt_only: bool = False
    reader: Callable[[], MessageReader] | None = None
    details: list[Callable[[Choice, Piece], dict[str, Any]]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    formatter: Formatter = field(init=False)

    def refusal(self, message: str) -> ApiError:
        """Return the error (400) of a request that cannot be served, in the client's names of fields.

        message: what is wrong. It begins with a setting's name, such as "top_p", or speaks of "the prompt".
        """
        setting = message.partition(" ")[0]
        if setting == "grammar":
            message = self.explain(message)
        name = self.names.get(setting, setting)
        if message.startswith(setting):
            message = name + message[len(setting) :]
        if name in self.fields:
            return wrong(name, message)
        if "the prompt " not in message:
            return wrong(None, message)
        return bad_prompt(self.source, message, self.place if self.listed else None)
