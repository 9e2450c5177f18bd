"""The requests' fields, with OpenAI's names and meanings, and vLLM's where OpenAI has none.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/. Types are checked here, values where they
mean something: `SamplingParams`, `Limits`, the engine.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from common.sampling.params import MAX_INT
from serving.http.errors import wrong


class StreamOptions(Struct):
    """include_usage: one more chunk with the usage; `continuous_usage_stats`, of the appendix: in each."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generation(Struct, kw_only=True, forbid_unknown_fields=True):
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

    # ours
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class CompletionBody(Generation, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]


Body = TypeVar("Body", bound=Generation)


def decode(kind: type[Body], body: bytes) -> Body:
    """Read a request.

    Raises:
        ApiError: it is no JSON, a field is unknown, has the wrong type, or is out of its bounds.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)|(?:required|unknown) field `(.+)`", str(error))
        field = where and (where[1] or where[2])
        narrow = field and re.match("Invalid enum value|Expected `null`", str(error))
        said = f"{field} may not have this value here" if narrow else "the body does not fit"
        raise wrong(field, f"{said}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(None, f"the body is no JSON: {error}") from None
