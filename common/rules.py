"""The rules that all phases share: which prompts can be served, how long an output may be, when it ends."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, integer, shown
from common.events import FinishReason
from common.sampling.params import SamplingParams

NO_GRAMMARS = (
    "grammar is set, but must be None for an engine that masks no tokens: see phase 12"
)


def check_prompt(
    prompt_ids: Sequence[int],
    vocab_size: int,
    max_context: int,
    params: SamplingParams,
    *,
    has_tokenizer: bool = True,
) -> NDArray[np.int64]:
    """Return a prompt's token ids, int64 `[P]`; raise `UserError` for a request that no phase can serve.

    params: the request's, checked as far as they depend on the prompt or the engine, but for the grammar.
    has_tokenizer: False for an engine that sees only token ids and so cannot look for stop strings.

    Every phase calls this before it computes. The rule for lengths is vLLM's: prompt and output together
    never exceed `max_context` tokens, and a prompt must leave room for one, so a prompt has at most
    `max_context - 1` tokens. `max_tokens` may ask for more than there is room for; the request then ends with
    "length" when the context is full (`output_limit`).
    """
    last = vocab_size - 1
    if not isinstance(params, SamplingParams):
        raise UserError(f"params is {shown(params)}, but must be a SamplingParams")
    try:
        ids, count = list(prompt_ids), len(prompt_ids)
    except TypeError:
        raise UserError(
            f"the prompt is {shown(prompt_ids)}, but must be a list of token ids"
        ) from None
    if count == 0:
        raise UserError("the prompt is empty, but must have at least 1 token")
    if count >= max_context:
        raise UserError(
            f"the prompt has {count} tokens, but must have at most {max_context - 1}, "
            f"so that one generated token fits the context of {max_context}"
        )
    numbers = _numbers_of(ids)
    low = numbers.min()
    if low < 0 or numbers.max() >= vocab_size:
        bad = min(ids) if low < 0 else max(ids)
        raise UserError(
            f"the prompt holds token id {shown(bad)}, but ids must be between 0 and {last}"
        )
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        for token in tokens:
            if token >= vocab_size:
                raise UserError(
                    f"{name} holds token id {token}, but ids must be between 0 and {last}"
                )
    if params.stop and not has_tokenizer:
        raise UserError(
            f"stop is {params.stop!r}, but must be empty for an engine that has no tokenizer"
        )
    return numbers


def _numbers_of(ids: list[int]) -> NDArray[np.int64]:
    """Return token ids as an array, int64 `[P]`. Raises `UserError` for an element that is not an integer."""
    with suppress(TypeError, OverflowError):
        numbers = np.frombuffer(array("q", ids), np.int64)  # half the time of looking at each
        doubtful = np.flatnonzero(numbers <= 1).tolist()  # True and False pass for 1 and 0
        if bool not in map(type, map(ids.__getitem__, doubtful)):
            return numbers
    for token in ids:
        integer("a token id of the prompt", token)
    return np.array(ids, object)  # one is beyond 64 bits, so no vocabulary has it


def output_limit(prompt_len: int, params: SamplingParams, max_context: int) -> int:
    """Return the most tokens a request can generate: `max_tokens`, or fewer if `max_context` has no room."""
    return min(params.max_tokens, max_context - prompt_len)


def finish_reason(
    token: int,
    output_len: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    limit: int,
) -> FinishReason | None:
    """Return why `token` ends its request, "stop" or "length"; None: it does not.

    token: the newest generated token, number `output_len` of the output (counted from 1).
    limit: most output tokens. eos_ids: the model's end-of-sequence tokens.

    A stop token beyond the first `min_tokens` tokens is "stop", even as the last one allowed; so is an
    end-of-sequence token, unless `ignore_eos`. (The sampler masks them before that; the rule is repeated
    here for tokens that did not come from it.) Stop strings need text, which `TextStream` searches. Under a
    grammar an end-of-sequence token is allowed only where the output may end, so it always ends it.
    """
    if params.grammar is not None and token in eos_ids:
        return "stop"
    if output_len > params.min_tokens:
        if token in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token in eos_ids:
            return "stop"
    if output_len >= limit:
        return "length"
    return None
