"""The fields of requests, with OpenAI's names and meanings, and vLLM's where OpenAI has none.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/. Types are checked here, values where they
mean something: `SamplingParams`, `Limits`, the engine. A body is bounded before it is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from common.sampling.params import MAX_INT
from serving.http.errors import wrong

MAX_DEPTH = 128
"""Deepest nesting of a body: what looks through it recurses."""
_QUOTE = ord('"')
_PARTS = np.isin(np.arange(256), list(b"{[:"))
_STEPS = np.isin(np.arange(256), list(b"{[")).astype(np.int32) - np.isin(np.arange(256), list(b"}]"))


class StreamOptions(Struct):
    """include_usage: one more chunk with the usage; continuous_usage_stats: usage in each chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(Struct, kw_only=True):
    """Fields of all requests for tokens. None is the same as a field that is not there."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None  # to a text unless false, to a conversation only if true

    # ours
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class CompletionFields(Struct, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatFields(Struct, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None


T = TypeVar("T")


def decode(body: bytes, most_parts: int) -> dict[str, Any]:
    """Return the fields of a body. Raises `ApiError` if it is no JSON object, or has too many parts."""
    check_parts(body, most_parts)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(None, f"the body is no JSON object: {error}") from None


def check_parts(body: bytes, most: int) -> None:
    """Raise `ApiError` for JSON of too many parts, or nested too deeply, before any of them is decoded.

    Each part costs a microsecond or more in which no stream goes on. What stands in strings does not count.
    """
    opened = body.count(b"{") + body.count(b"[")
    if opened <= MAX_DEPTH and opened + body.count(b":") <= most:
        return
    text = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    outside = ~np.bitwise_xor.accumulate(text == _QUOTE)
    if np.count_nonzero(_PARTS[text] & outside) > most:
        raise wrong(None, f"the body has more than {most:,} objects, lists and keys, which is the limit")
    if np.cumsum(_STEPS[text] * outside).max(initial=0) > MAX_DEPTH:
        raise wrong(None, f"the body nests deeper than {MAX_DEPTH} levels, which is the limit")


def convert(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Return the fields that a struct declares; others are left alone. Raises `ApiError` for a wrong type."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise wrong(*_in_words(str(error))) from None


_TYPES = {
    **{"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"},
    **{"array": "a list", "object": "an object", "null": "null"},
}


def _in_words(message: str) -> tuple[str | None, str]:
    """Return the field that msgspec complains of, and the complaint as a sentence."""
    found = re.search(r"`\$\.?([^`]*)`$", message)
    path = found[1] if found else ""
    if missing := re.search(r"required field `(\w+)`", message):
        path = f"{path}.{missing[1]}".lstrip(".")
        return path.partition(".")[0].partition("[")[0], f"{path} is missing"
    field = re.match(r"\w*", path)[0]  # type: ignore[index]  # it matches nothing, too
    if value := re.match(r"Invalid enum value (.{1,60})", message.partition(" - at ")[0]):
        return field, f"{path} is not supported with the value {value[1]}"
    if message.startswith("Expected `null`"):
        return field, f"{path} is not supported"
    kinds = re.match(r"Expected `([^`]+)`(?:, got `(\w+)`)?(.*?) - at", message)
    if kinds is None:
        return field or None, f"{path}: {message}"
    names = [_TYPES.get(name, name) for name in kinds[1].split(" | ") if name != "null"]
    got = f", but is {_TYPES.get(kinds[2], kinds[2])}" if kinds[2] else kinds[3]
    return field, f"{path} must be {' or '.join(names)}{got}"
