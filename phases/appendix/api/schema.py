"""All fields of the API: OpenAI's and vLLM's, those of the phase among them.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/.
"""

from __future__ import annotations

from typing import Any

from serving.http.schema import ForModel, Generation


class Wide(Generation, kw_only=True):
    """Fields of all requests for tokens, those of the phase among them."""

    # vLLM's
    return_token_ids: bool | None = False
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    # ours
    return_token_marks: bool | None = False  # in streams: the text of each token, and how it came about

    # taken, and without a meaning here
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(Wide, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


class GenerateRequest(Wide, kw_only=True):
    """`POST /generate`: one prompt, one text."""

    prompt: str | list[int]
    add_special_tokens: bool | None = True


class ChatRequest(Wide, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # taken, and without a meaning here
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None


class TokenizeRequest(ForModel, kw_only=True):
    """`POST /tokenize`: a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = None  # of a text unless false, of a conversation only if true
    return_token_strs: bool | None = False


class DetokenizeRequest(ForModel, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
