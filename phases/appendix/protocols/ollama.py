"""Ollama's routes: https://docs.ollama.com/api."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from common.http.errors import ErrorForm, wrong
from common.json_text import convert_fields, encode_json
from phases.appendix.api.reasoning import reasons
from phases.appendix.protocols.translation import Events, Translation, renamed
from phases.appendix.tools.written import decode_written
from serving.app import App
from serving.completion import Choice, serve
from serving.endpoints import COPIED, ChatEndpoint, ServedModel
from serving.http.request import HttpRequest
from serving.messages import Ready
from serving.parsed import ParsedRequest

if TYPE_CHECKING:
    from phases.appendix.embeddings.endpoint import Embeddings

LATEST = ":latest"
VERSION = "0.12.0"
"""The version of Ollama's API that is spoken here."""
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS |= {
    name: name
    for name in COPIED
    if name not in ("n", "max_tokens", "repetition_penalty", "logit_bias")
}
"""Names of settings of the sampler, and what a chat calls them."""
NAMES = {name: f"options.{option}" for option, name in OPTIONS.items()}
NAMES |= {"response_format": "format", "reasoning_effort": "think"}
NAMES |= {"chat_template_kwargs.enable_thinking": "think"}
LINES = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]
DETAILS = {
    "format": "safetensors",
    "family": "",
    "parameter_size": "",
    "quantization_level": "",
}


def error_form(names: Mapping[str, str]) -> ErrorForm:
    """Return the form (`ErrorForm`) of error responses that Ollama's clients read: `{"error": text}`.

    names: field of a chat -> the name of the same field in Ollama's request, which the text uses.
    """
    shape = renamed(names, lambda body: body["error"] | {"error": body["error"]["message"]})
    return ErrorForm(shape, b"%s\n")


class OllamaFields(Struct, kw_only=True):
    """Body of Ollama's `POST /api/chat`, with messages, and `/api/generate`, with a prompt."""

    model: str | None = None
    stream: bool | None = True
    options: dict[str, Any] | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    # of /api/chat
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    # of /api/generate
    prompt: str | None = ""
    system: str | None = None
    raw: Literal[False] | None = False
    suffix: Literal[""] | None = None
    images: list[Any] | None = None


class Ollama(Translation):
    """Ollama's routes `/api/chat` and `/api/generate`: translates requests to chats of OpenAI's form.

    talks: True: `/api/chat`, whose requests have messages; False: `/api/generate`, with a prompt.
    """

    fields = OllamaFields

    def __init__(self, chat: ChatEndpoint, *, talks: bool) -> None:
        super().__init__(chat)
        self.talks = talks
        self.names = NAMES if talks else NAMES | {"messages": "prompt"}
        self.form = error_form(self.names)

    def translate(self, given: OllamaFields, ignored: list[str]) -> dict[str, Any]:
        """Return the fields of the OpenAI chat that is equivalent to a request.

        given: Ollama's fields. ignored: a list for the names of fields without effect; here none are added.
        """
        messages = [
            {"name" if field == "tool_name" else field: value for field, value in said.items()}
            for said in given.messages or []
        ]
        if not self.talks:
            if given.images:
                raise wrong("images", "images are not supported: a prompt is text")
            messages = [{"role": "user", "content": given.prompt}]
        last = messages[-1] if len(messages) > 1 else {}
        fields: dict[str, Any] = {
            "model": untagged(self.chat.model, given.model),
            "messages": messages,
            "system": given.system,
            "stream": given.stream is not False,
            "tools": given.tools,
            "continue_final_message": last.get("role") == "assistant"
            and last.get("content") is not None
            and not last.get("tool_calls"),
        }
        options = {
            # 5.0 is a whole number to Ollama
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in (given.options or {}).items()
            if value is not None
        }
        most = options.get("num_predict")
        if isinstance(most, int) and most < 0:  # as many as there is room for
            del options["num_predict"]
        fields |= {OPTIONS[name]: value for name, value in options.items() if name in OPTIONS}
        if given.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif given.format:
            fields["response_format"] = {"type": "json_schema", "schema": given.format}
        if isinstance(given.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": given.think}
        else:
            fields["reasoning_effort"] = given.think
        return fields

    def formatter(
        self, given: OllamaFields, request: ParsedRequest, http: HttpRequest
    ) -> OllamaEvents:
        """Return the formatter that writes the chat's response as Ollama's lines of JSON.

        given: Ollama's fields. request: the chat that they were translated to. http: not used.
        """
        return OllamaEvents(self.chat.model, talks=self.talks)

    def loads(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response to a request without a prompt, by which clients load or unload a model.

        Nothing is loaded or unloaded. Return None if the request has a prompt. fields: the request's body.

        Raises:
            ApiError: the request names another model than the served one.
        """
        given = convert_fields(OllamaFields, fields)
        if given.messages if self.talks else given.prompt:
            return None
        check_model(self.chat.model, given.model)
        unload = str(given.keep_alive) in ("0", "0s", "0m", "0.0")
        events = OllamaEvents(self.chat.model, talks=self.talks)
        return events.line({"content": ""}, done=True) | {
            "done_reason": "unload" if unload else "load"
        }


def check_model(model: ServedModel, name: str | None) -> None:
    """Raise `ApiError` if a request's model `name` is not the served one; `:latest` may be left out.

    None is accepted.
    """
    model.check(untagged(model, name))


def untagged(model: ServedModel, name: str | None) -> str | None:
    """Return the `name` of a model in a request without `:latest`, unless the served one is called so."""
    return name if not name or name == model.name else name.removesuffix(LATEST)


class OllamaEvents(Events):
    """Writes a chat's response as Ollama's lines of JSON; a tool call is sent when it is complete.

    talks: True: the text is in a `message` (`/api/chat`); False: in `response` (`/api/generate`).
    """

    headers = LINES

    def __init__(self, model: ServedModel, *, talks: bool) -> None:
        super().__init__({"model": model.name})
        self.talks = talks
        self._began = time.perf_counter()
        self._message: dict[str, Any] = {"content": ""}
        self._calls: list[dict[str, Any]] = []

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """Return an event's fields as a line of JSON. kind: not used."""
        return encode_json(event) + b"\n"

    def take(self, delta: dict[str, Any]) -> None:
        """Add to the response a line for each text of `delta`, the next part of the chat's message.

        delta: in OpenAI's form, has `reasoning_content`, `content` or `tool_calls`; calls wait for `finish`.
        """
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({**call["function"]})
            self._calls[-1]["arguments"] += call["function"]["arguments"]
        for name, text in (
            ("thinking", delta.get("reasoning_content")),
            ("content", delta.get("content")),
        ):
            if text:
                self._message[name] = self._message.get(name, "") + text
                self.say("", **self.line({"content": "", name: text}, done=False))

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """Add to the response a line with the tool calls, if any, and the last line.

        The last line has why the response ended, token counts, and durations in nanoseconds.

        Args:
            choice: the completion.
            reason: why it ended: `stop`, `length` or `tool_calls`.
            usage: token counts as OpenAI's chat has them: `prompt_tokens`, `completion_tokens`.
        """
        if choice.reader is not None and choice.reader.complete:
            functions = [
                call | {"arguments": decode_written(call["arguments"]) or {}}
                for call in self._calls
            ]
            self._message["tool_calls"] = [{"function": function} for function in functions]
            calls = {"content": "", "tool_calls": self._message["tool_calls"]}
            self.say("", **self.line(calls, done=False))
        now, began = time.perf_counter(), self._began
        first = min(choice.times, default=began)
        spans = {"total_duration": now - began, "prompt_eval_duration": first - began}
        spans |= {"eval_duration": now - first, "load_duration": 0}
        end: dict[str, Any] = {name: int(seconds * 1e9) for name, seconds in spans.items()}
        end |= {
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }
        end["done_reason"] = "length" if reason == "length" else "stop"
        self.say("", **self.line({"content": ""}, done=True), **end)
        self.value = self.line(self._message, done=True) | end

    def line(self, message: dict[str, Any], *, done: bool) -> dict[str, Any]:
        """Return one line of Ollama's response as a dictionary.

        message: the fields of this part of the message: `content`, `thinking`, `tool_calls`.
        done: whether it is the last line.
        """
        if self.talks:
            said: dict[str, Any] = {"message": {"role": "assistant", **message}}
        else:
            said = {"response": message["content"]}
            said |= {n: message[n] for n in ("thinking", "tool_calls") if n in message}
        return {"model": self.value["model"], "created_at": _now(), **said, "done": done}


def card(app: App) -> dict[str, Any]:
    """Return the served model's entry in Ollama's lists of models: name, size, format."""
    name = app.model.name.removesuffix(LATEST) + LATEST
    return {"name": name, "model": name, "size": 0, "digest": "", "details": DETAILS}


async def tags(app: App, http: HttpRequest) -> None:
    """Respond with Ollama's list of models, which has only the served one."""
    await http.json({"models": [card(app) | {"modified_at": _now()}]})


async def running(app: App, http: HttpRequest) -> None:
    """Respond with Ollama's list of loaded models, which has only the served one."""
    ready = app.ready()
    more = {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0,
        "context_length": ready.max_len,
    }
    await http.json({"models": [card(app) | more]})


async def show(app: App, http: HttpRequest) -> None:
    """Respond with what is known of the served model: sampling defaults, sizes, capabilities."""

    def parse(fields: dict[str, Any], ready: Ready) -> dict[str, Any]:
        check_model(app.model, convert_fields(OllamaFields, fields).model)
        return {
            "modelfile": "",
            "template": "",
            "details": DETAILS,
            "parameters": "\n".join(
                f"{name} {value}" for name, value in app.model.defaults.items()
            ),
            "model_info": {
                "general.architecture": "ladder",
                "ladder.context_length": ready.max_len,
            },
            "capabilities": capabilities(app.model),
        }

    await http.json(await app.read(http, app.chat, parse))


def capabilities(model: ServedModel) -> list[str]:
    """Return what the model can do, in Ollama's words, such as "completion" and "tools"."""
    if not model.tokenizer.templates.available:
        return ["completion", "embedding"]
    thinking = ["thinking"] if reasons(model.tokenizer) else []
    return ["completion", "tools", "embedding", *thinking]


def add_ollama(app: App, path: str, route: Ollama | Embeddings) -> None:
    """Let `route` serve POST requests at `path`, including those that only load the model."""
    app.add(path, route)
    app.routes[path] = {"POST": partial(generate, app, route)}


async def generate(app: App, ollama: Ollama | Embeddings, http: HttpRequest) -> None:
    """Respond to a request of `/api/generate`, `/api/chat` or `/api/embed`.

    If the request has no input, only confirm that the model is loaded.

    app: the server. ollama: the route, which translates the request.
    """

    def parse(fields: dict[str, Any], ready: Ready) -> ParsedRequest | dict[str, Any]:
        return ollama.loads(fields) or app.parse(ollama, http, fields, ready)

    request = await app.read(http, ollama, parse)
    if isinstance(request, dict):
        await http.json(request)
    else:
        await serve(app, http, request)


def _now() -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09d}Z"
    )
