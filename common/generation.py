"""What every phase yields and when it stops: events, completions, the finish rule and the check of a prompt.

A phase is something with `stream`; `generate` collects its events. The rules that all phases must share (when
a request ends, how long a prompt may be) stand here once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from common.errors import UserError, integer
from common.sampling_params import SamplingParams
from common.stop_checker import StopChecker
from common.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "FinishReason",
    "Logprob",
    "Params",
    "StopChecker",
    "Streams",
    "TextStream",
    "TokenEvent",
    "check_prompt",
    "finish_reason",
    "generate",
    "output_limit",
    "params_per_prompt",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a request ended: "stop" (end-of-sequence token, stop token or stop string), "length" (max_tokens or the
context is full), "abort" (its caller gave up), "error" (its step failed)."""

Params = SamplingParams | Sequence[SamplingParams]
"""One for all prompts, or one for each."""


class Logprob(NamedTuple):
    """Log-probabilities at one position, of the model itself: before temperature, penalties and bias.

    chosen: natural logarithm of the chosen token's probability.
    top: the most likely (token id, log-probability) pairs, best first, as many as `logprobs` asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(NamedTuple):
    """One token of one request, or the end of a request.

    index: which prompt.
    token_id: None for an end that brings no token ("abort", "error", or max_tokens 0).
    finish_reason: None until the completion's last event.
    time: `time.perf_counter()`, in seconds, when the host knew the token.
    logprob: None unless asked for.
    sample: which of the prompt's n completions.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    sample: int = 0


class Streams(Protocol):
    """What the `load` of every phase returns."""

    def stream(self, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
        """Generate for every prompt (token ids).

        The events of one completion come in order; completions may interleave. Each of a prompt's n
        completions ends with exactly one event that has a finish reason.
        """
        ...


@dataclass
class Completion:
    """One finished (or aborted) generation.

    token_ids: every generated token, the end-of-sequence or stop token that ended it included.
    text: its text without that token and cut before a stop string; empty when there was no tokenizer.
    logprobs: one for each token, or None when not asked for.
    arrival, times: `time.perf_counter()` seconds when the request was made and when each token was known.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    arrival: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[Logprob] | None = None
    times: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, in milliseconds; None without a token."""
        return (self.times[0] - self.arrival) * 1e3 if self.times else None

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies, in milliseconds: one less than there are tokens."""
        return [(late - early) * 1e3 for early, late in zip(self.times, self.times[1:], strict=False)]

    @property
    def e2e_ms(self) -> float | None:
        """From arrival to the last event, in milliseconds; None before it."""
        return None if self.finished is None else (self.finished - self.arrival) * 1e3

    def add(self, event: TokenEvent) -> None:
        """Take in the next event of this completion."""
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            self.times.append(event.time)
            if event.logprob is not None:
                if self.logprobs is None:
                    self.logprobs = []
                self.logprobs.append(event.logprob)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.finished = event.time


class TextStream:
    """The text of one completion, from its events, in pieces that can be shown at once.

    The end-of-sequence or stop token that ended it is left out, and so is a stop string with what follows it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Begin with an empty text."""
        self._checker = StopChecker(tokenizer, params)
        self._shown = 0
        self.text = ""

    def push(self, event: TokenEvent) -> str:
        """Take in the next event of the completion; returns the text to show after what was shown before."""
        checker = self._checker
        before = checker.text + checker.held
        stopped = event.token_id is not None and checker.push(event.token_id)
        if event.finish_reason == "stop" and not stopped:  # so the token itself ended it
            self.text = before
        else:
            self.text = checker.text if event.finish_reason is None else checker.finish()
        new = self.text[self._shown :]
        self._shown = len(self.text)
        return new


def params_per_prompt(prompts: Sequence[Sequence[int]], params: Params) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt. Raises `UserError` when their numbers differ."""
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise UserError(f"params has {len(params)} entries, but must have one a prompt, {len(prompts)}")
    return list(params)


def generate(
    engine: Streams,
    prompts: Sequence[Sequence[int]],
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
) -> list[Completion]:
    """Run `engine` on `prompts` (token ids) to the end; completions in (prompt, sample) order.

    tokenizer: fills in the completions' texts; without one they stay empty.
    """
    each = params_per_prompt(prompts, params)
    for prompt in prompts:
        if not isinstance(prompt, Iterable):
            raise UserError(f"prompts holds {prompt!r}, but must hold prompts, which are lists of token ids")
    ids = [list(prompt) for prompt in prompts]
    arrival = time.perf_counter()
    completions = {
        (index, sample): Completion(index, sample, prompt, arrival)
        for index, (prompt, settings) in enumerate(zip(ids, each, strict=True))
        for sample in range(settings.n)
    }
    texts = {key: TextStream(tokenizer, each[key[0]]) for key in completions} if tokenizer else {}
    for event in engine.stream(ids, each):
        key = event.index, event.sample
        completions[key].add(event)
        if key in texts:
            texts[key].push(event)
            completions[key].text = texts[key].text
    return list(completions.values())


def check_prompt(
    prompt_ids: Sequence[int],
    vocab_size: int,
    max_context: int,
    params: SamplingParams,
    *,
    has_tokenizer: bool = True,
) -> None:
    """Raise `UserError` for a request that no phase can serve; every phase calls this before it computes.

    The rule for lengths is vLLM's: prompt and output together never exceed `max_context` tokens, and a prompt
    must leave room for one, so a prompt has at most `max_context - 1` tokens. `max_tokens` may ask for more
    than there is room for; the request then ends with "length" when the context is full (`output_limit`).

    has_tokenizer: False for an engine that sees only token ids and so cannot look for stop strings.
    """
    last = vocab_size - 1
    if not set(map(type, prompt_ids)) <= {int}:  # seldom: numpy's integers, or a mistake
        for token in prompt_ids:
            integer("a token id of the prompt", token)
    if len(prompt_ids) == 0:
        raise UserError("the prompt is empty, but must have at least 1 token")
    if len(prompt_ids) >= max_context:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, but must have at most {max_context - 1}, "
            f"so that one generated token fits the context of {max_context}"
        )
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"the prompt holds token id {bad}, but ids must be between 0 and {last}")
    for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in tokens:
            if token >= vocab_size:
                raise UserError(f"{name} holds token id {token}, but ids must be between 0 and {last}")
    if params.stop and not has_tokenizer:
        raise UserError(f"stop is {params.stop!r}, but must be empty for an engine that has no tokenizer")


def output_limit(prompt_len: int, params: SamplingParams, max_context: int) -> int:
    """Return the most tokens a request can generate: `max_tokens`, or what the context has room for."""
    return min(params.max_tokens, max_context - prompt_len)


def finish_reason(
    token: int,
    output_len: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    limit: int | None = None,
) -> FinishReason | None:
    """Why `token` ends its request, or None: the one finish rule of all phases.

    token: the newest generated token, number `output_len` of the output (counted from 1).
    limit: `output_limit(...)`; None means `params.max_tokens`.

    A stop token beyond the first `min_tokens` tokens is "stop", even as the last one allowed; so is an
    end-of-sequence token, unless `ignore_eos`. (The sampler masks them before that; the rule is repeated here
    for tokens that did not come from it.) Stop strings need text: see `StopChecker`.
    """
    if output_len > params.min_tokens:
        if token in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token in eos_ids:
            return "stop"
    if output_len >= (params.max_tokens if limit is None else limit):
        return "length"
    return None
