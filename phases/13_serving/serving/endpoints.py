"""Routes that generate tokens: they turn a request's fields into prompts and settings for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from common.errors import UserError
from common.http.errors import ApiError, ErrorForm, wrong
from common.http.limits import Limits
from common.json_text import convert_fields
from common.rules import check_prompt
from common.sampling.params import MAX_INT, SamplingParams
from common.text.chat_template import count_characters
from common.text.tokenizer import Tokenizer
from serving.formatter import ResponseFormatter
from serving.http.request import HttpRequest
from serving.http.schema import ChatFields, GenerationFields
from serving.messages import Ready
from serving.parsed import ParsedRequest
from serving.seams import FieldHandler

COPIED = sorted({*GenerationFields.__struct_fields__} & {*SamplingParams.__dataclass_fields__})
"""Fields that are settings of the sampler."""
RESERVED = {
    "messages",
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "ignored",
    "tools",
    "self",
}
"""Variables of a template that are not a client's."""


@dataclass
class ServedModel:
    """The model that requests are for.

    name: the name by which clients know it. limits: of requests. defaults: of sampling settings, by name.
    """

    name: str
    tokenizer: Tokenizer
    limits: Limits = field(default_factory=Limits)
    defaults: Mapping[str, float] = field(default_factory=dict)

    def check(self, name: str | None) -> None:
        """Raise `ApiError` (404) if `name`, a request's field `model`, is another model's; None is fine."""
        if name is not None and name != self.name:
            words = f"model is {name[:100]!r}, but this is {self.name!r}"
            raise ApiError(404, words, param="model", code="model_not_found")

    def begin(self, fields: Mapping[str, Any], ready: Ready, source: str) -> ParsedRequest:
        """Return a parsed request with only the fields set that all requests for tokens may have."""
        generation = convert_fields(GenerationFields, fields)
        self.check(generation.model)
        sampling = dict[str, Any]()
        for name in COPIED:
            if (value := getattr(generation, name)) is not None:
                sampling[name] = value
        return ParsedRequest(generation, fields, sampling, ready, source)

    def check_length(self, request: ParsedRequest, characters: int) -> None:
        """Raise `ApiError` if a prompt of so many characters is too long, before it is tokenized."""
        each, most = self.tokenizer.characters_per_token, request.ready.max_len
        if each and characters > each * most:
            raise request.refusal(
                f"the prompt has {characters:,} characters, but must have at most what {most} tokens hold"
            )

    def finish(self, request: ParsedRequest) -> None:
        """Set a request's sampling settings once its prompts are known; `ApiError` if it cannot be served."""
        ready = request.ready
        for call in request.on_prompt:
            call()
        given: dict[str, Any] = {"temperature": 1.0, **self.defaults, **request.sampling}
        if "max_tokens" not in given:
            cache = ready.blocks * ready.block_size + 1 if ready.blocks else MAX_INT
            room = max(1, min(ready.max_len, cache) - max(map(len, request.prompts)))
            most = min(room, request.default_tokens)
            given["max_tokens"] = max(most, given.get("min_tokens", 0))
        try:
            request.params = SamplingParams(**given)
            for request.place, prompt in enumerate(request.prompts):  # noqa: B020
                check_prompt(prompt, ready.vocab_size, ready.max_len, request.params)
        except UserError as error:
            raise request.refusal(str(error)) from None


class TextEndpoint:
    """The common part of the routes for completions and chats.

    model: the served one. handlers: read further fields of its requests. kind: the struct of its own.
    formatter: makes its responses. prefix: the beginning of the ids of responses.
    """

    kind: type[Struct]
    source: str
    prefix: str
    formatter = ResponseFormatter
    form = ErrorForm()
    threaded = False

    def __init__(self, model: ServedModel, handlers: Sequence[FieldHandler]) -> None:
        self.model = model
        self.handlers = handlers
        others = [handler.fields for handler in handlers]
        self.kinds: Sequence[type[Struct]] = [GenerationFields, self.kind, *others]

    def parse(
        self, http: HttpRequest, fields: Mapping[str, Any], ready: Ready
    ) -> ParsedRequest:
        """Return a request for tokens, parsed from its decoded body `fields` and checked."""
        request = self.read(fields, ready)
        self.model.finish(request)
        id = f"{self.prefix}-{http.id}"
        request.formatter = self.formatter(id, self.model.name, request)
        return request

    def read(self, fields: Mapping[str, Any], ready: Ready) -> ParsedRequest:
        """Return a request for tokens with its prompts, but without sampling settings yet. See `parse`."""
        raise NotImplementedError

    def read_fields(self, request: ParsedRequest) -> None:
        """Call the handlers of fields and message roles that `request` has; handlers change it in place."""
        names = set(request.fields)
        for message in request.messages:
            names.update(message, [str(message.get("role"))])
        for handler in self.handlers:
            if not names.isdisjoint(handler.names):
                handler.read(convert_fields(handler.fields, request.fields), request)


class ChatEndpoint(TextEndpoint):
    """The route `/v1/chat/completions`: replies to a conversation, rendered by the model's chat template."""

    kind = ChatFields
    source, prefix = "messages", "chatcmpl"

    def read(self, fields: Mapping[str, Any], ready: Ready) -> ParsedRequest:
        """Return a chat request whose prompt the chat template has made of `messages`. See `parse`."""
        request = self.model.begin(fields, ready, self.source)
        given = convert_fields(ChatFields, fields)
        request.messages = [
            message | {"role": "system"} if message.get("role") == "developer" else message
            for message in given.messages  # OpenAI's newer name, which templates do not know
        ]
        request.variables = dict(given.chat_template_kwargs or {})
        if reserved := RESERVED & request.variables.keys():
            raise wrong(
                "chat_template_kwargs", f"chat_template_kwargs may not hold {min(reserved)!r}"
            )
        if given.max_completion_tokens is not None:
            request.sampling["max_tokens"] = given.max_completion_tokens
            request.names["max_tokens"] = "max_completion_tokens"
        request.variables |= {
            "add_generation_prompt": given.add_generation_prompt is not False,
            "add_special_tokens": bool(request.generation.add_special_tokens),
        }
        self.model.check_length(request, count_characters(given.messages))
        self.read_fields(request)
        ignored, chat = set[str](), self.model.tokenizer.chat
        request.prompts = [chat(request.messages, ignored=ignored, **request.variables)]
        request.ignored += map("messages.{}".format, sorted(ignored))
        return request
