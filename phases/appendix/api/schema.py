"""All fields of the API: OpenAI's and vLLM's, those of the phase among them.

https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/. What must not be said has the type None.
"""

from __future__ import annotations

from typing import Any, Literal

from serving.http.schema import Generation


class Wide(Generation, kw_only=True, forbid_unknown_fields=False):
    """Fields of all requests for tokens, those of the phase among them."""

    add_special_tokens: bool | None = (
        None  # to a text unless false, to a conversation only if true
    )
    prompt_logprobs: None = None

    # vLLM's
    return_token_ids: bool | None = False
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    # ours
    return_token_marks: bool | None = (
        False  # in streams: the text of each token, and if it was a draft
    )


class CompletionRequest(Wide, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: Literal[False] | None = False
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class ChatRequest(Wide, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: None = None
    function_call: None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Literal[False] | None = False
    chat_template: None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = True
