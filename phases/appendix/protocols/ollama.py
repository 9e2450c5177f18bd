"""Ollama's `/api/chat`, `/api/generate` and what its clients ask before: https://docs.ollama.com/api."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from phases.appendix.api.endpoints import WideChat
from phases.appendix.protocols.translation import Events, NamedErrors, Translation
from serving.app import App
from serving.completion import Choice
from serving.endpoints import COPIED
from serving.http.errors import ApiError
from serving.http.exchange import Exchange
from serving.http.schema import Generation

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
NAMES = {name: f"options.{option}" for option, name in OPTIONS.items()} | {
    "response_format": "format"
}
LINES = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]
DETAILS = {
    "format": "safetensors",
    "family": "",
    "parameter_size": "",
    "quantization_level": "",
}


class OllamaRequest(Generation, kw_only=True, forbid_unknown_fields=False):
    """`POST /api/chat`, with messages, and `/api/generate`, with a prompt: Ollama's."""

    stream: bool | None = True
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None

    # of /api/chat
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    # of /api/generate
    prompt: str = ""
    system: str | None = None
    raw: Literal[False] | None = False
    suffix: Literal[""] | None = None
    images: None = None

    def __post_init__(self) -> None:
        """Take a name with Ollama's usual tag as the name without."""
        self.model = self.model and self.model.removesuffix(LATEST)


class OllamaErrors(NamedErrors):
    """Errors as Ollama's clients read them: a text."""

    def body(self, error: ApiError) -> dict[str, Any]:
        """See `ErrorForm`."""
        told = super().body(error)["error"]
        return told | {"error": told["message"]}

    def event(self, body: bytes) -> bytes:
        """See `ErrorForm`."""
        return body + b"\n"


class Ollama(Translation):
    """`/api/chat`; or `/api/generate`, which does not talk in messages."""

    body = OllamaRequest

    def __init__(self, chat: WideChat, *, talks: bool) -> None:
        super().__init__(chat)
        self.talks, self.form = (
            talks,
            OllamaErrors(NAMES if talks else NAMES | {"messages": "prompt"}),
        )

    def translate(self, request: OllamaRequest) -> dict[str, Any]:
        """See `Translation`."""
        fields: dict[str, Any] = {"messages": request.messages or []}
        if not self.talks:
            fields["messages"] = [{"role": "user", "content": request.prompt}]
            fields["system"] = request.system or None
        given = {
            name: value for name, value in (request.options or {}).items() if value is not None
        }
        most = given.get("num_predict")
        if isinstance(most, int) and most < 0:  # as many as there is room for
            del given["num_predict"]
        fields |= {OPTIONS[name]: value for name, value in given.items() if name in OPTIONS}
        if request.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif request.format:
            fields["response_format"] = {"type": "json_schema", "schema": request.format}
        if isinstance(request.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": request.think}
        return fields | {"tools": request.tools}

    def answer(self, exchange: Exchange, request: Any) -> OllamaEvents:
        """See `Endpoint`."""
        return OllamaEvents(self, {"model": self.model})


class OllamaEvents(Events):
    """Builds lines of JSON. A call is told when it is whole.

    talks: the text is a message; otherwise it is the field `response`.
    """

    headers = LINES

    def __init__(self, of: Ollama, value: dict[str, Any]) -> None:
        super().__init__(of, value)
        self.talks = of.talks
        self._message: dict[str, Any] = {"content": ""}
        self._calls: list[dict[str, Any]] = []

    def encode(self, kind: str, event: dict[str, Any]) -> bytes:
        """See `Events`."""
        return msgspec.json.encode(event) + b"\n"

    def take(self, delta: dict[str, Any]) -> None:
        """See `Events`."""
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
                self.say("", **self._line({"content": "", name: text}, done=False))

    def finish(self, choice: Choice, reason: str, usage: dict[str, Any]) -> None:
        """See `Events`."""
        if reason == "tool_calls":
            functions = [
                call | {"arguments": msgspec.json.decode(call["arguments"])}
                for call in self._calls
            ]
            self._message["tool_calls"] = [{"function": function} for function in functions]
            calls = {"content": "", "tool_calls": self._message["tool_calls"]}
            self.say("", **self._line(calls, done=False))
        now, began = time.perf_counter(), choice.group.arrived
        first = choice.group.first_token or began
        spans = {"total_duration": now - began, "prompt_eval_duration": first - began}
        spans |= {"eval_duration": now - first, "load_duration": 0}
        end: dict[str, Any] = {name: int(seconds * 1e9) for name, seconds in spans.items()}
        end |= {
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }
        end["done_reason"] = "length" if reason == "length" else "stop"
        self.say("", **self._line({"content": ""}, done=True), **end)
        self.value = self._line(self._message, done=True) | end

    def _line(self, message: dict[str, Any], *, done: bool) -> dict[str, Any]:
        if self.talks:
            said: dict[str, Any] = {"message": {"role": "assistant", **message}}
        else:
            said = {"response": message["content"]}
            said |= {"thinking": message["thinking"]} if "thinking" in message else {}
        return {"model": self.value["model"], "created_at": _now(), **said, "done": done}


async def tags(app: App, exchange: Exchange) -> None:
    """Answer with the one model there is."""
    name = app.model + LATEST
    model = {
        "name": name,
        "model": name,
        "modified_at": _now(),
        "size": 0,
        "digest": "",
        "details": DETAILS,
    }
    await exchange.json({"models": [model]})


async def show(app: App, exchange: Exchange) -> None:
    """Answer with what is known of it."""
    exchange.form = OllamaErrors({})
    _, ready = await app.begin(exchange, OllamaRequest)
    found: dict[str, Any] = {"modelfile": "", "template": "", "details": DETAILS}
    found["parameters"] = "\n".join(
        f"{name} {value}" for name, value in app.prompts.defaults.items()
    )
    found["model_info"] = {
        "general.architecture": "ladder",
        "ladder.context_length": ready.max_len,
    }
    found["capabilities"] = ["completion", "tools", "embedding"]
    await exchange.json(found)


def _now() -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09d}Z"
    )
