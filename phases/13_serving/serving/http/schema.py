"""The fields of requests, with OpenAI's names and meanings, and vLLM's where OpenAI has none.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/. Types are checked here, values later: by
`SamplingParams`, the server's `Limits`, or the engine.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class StreamOptions(Struct):
    """The field `stream_options` of a request.

    include_usage: send one more chunk with the token counts.
    """

    include_usage: bool | None = False


class GenerationFields(Struct, kw_only=True):
    """JSON fields that all requests for tokens may have; null counts as if the field were left out."""

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
    add_special_tokens: bool | None = (
        None  # to a text unless false, to a conversation only if true
    )


class CompletionFields(Struct, kw_only=True):
    """The fields of the body of `POST /v1/completions`, beside those of all requests for tokens."""

    prompt: str | list[str | int | list[int]]
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatFields(Struct, kw_only=True):
    """The fields of the body of `POST /v1/chat/completions`, beside those of all requests for tokens."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
