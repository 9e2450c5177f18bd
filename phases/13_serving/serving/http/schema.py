"""The requests' fields, with OpenAI's names and meanings, and vLLM's where OpenAI has none.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/. Types are checked here, values where they
mean something: `SamplingParams`, `Limits`, the engine.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from common.errors import UserError, integer
from common.sampling.params import MAX_INT
from serving.http.errors import ApiError


class StreamOptions(Struct):
    """include_usage: one more chunk with the usage. continuous_usage_stats: the usage in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ForModel(Struct, kw_only=True):
    """Fields of all requests. model: the name of the one that is served."""

    model: str | None = None


class Generation(ForModel, kw_only=True):
    """Fields of all requests for tokens. None is the same as a field that is not there."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
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
    priority: int | None = None
    cache_salt: str | None = None

    # ours
    deadline_ms: int | None = None


class CompletionBody(Generation, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]


class ChatBody(Generation, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


BOUNDS = {"priority": (-MAX_INT, MAX_INT), "deadline_ms": (1, MAX_INT)}
"""Of numbers that nothing else checks; a larger one could not be sent to the engine."""

Body = TypeVar("Body", bound=ForModel)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


_QUOTE = ord('"')
_PARTS = np.isin(np.arange(256), list(b"{[:"))


def check_parts(body: bytes, most: int) -> None:
    """Raise `ApiError` for a body of too many parts: each costs a microsecond in which no stream goes on.

    What stands in strings does not count. Other threads run on while a large body is looked through.
    """
    if sum(map(body.count, (b"{", b"[", b":"))) <= most:
        return
    text = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    inside = np.bitwise_xor.accumulate(text == _QUOTE)
    if np.count_nonzero(_PARTS[text] & ~inside) > most:
        raise ApiError(400, f"the body has more than {most:,} objects, lists and keys, which is the limit")


def decode(kind: type[Body], body: bytes) -> tuple[Body, list[str]]:
    """Read a request; also returns the names of the fields that it has and `kind` has not.

    Raises:
        ApiError: it is no JSON, or a field has the wrong type or is out of its bounds.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        given = _fields.decode(body)
        request: Body = decoder.decode(body)
    except msgspec.ValidationError as error:
        where = re.search(r"at `\$\.(\w+)", str(error)) or re.search(r"required field `(\w+)`", str(error))
        raise ApiError(400, f"the body does not fit: {error}", param=where[1] if where else None) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    for name, (low, high) in BOUNDS.items():
        if (value := getattr(request, name, None)) is not None:
            try:
                integer(name, value, low=low, high=high)
            except UserError as error:
                raise ApiError(400, str(error), param=name) from None
    return request, sorted(given.keys() - set(kind.__struct_fields__))
