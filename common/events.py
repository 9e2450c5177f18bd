"""Token events, and the completions that they add up to: the output of every phase.

A phase's engine has a method `stream` that yields events; `generate` collects them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from common.errors import UserError, shown
from common.sampling.params import SamplingParams
from common.text.text_stream import TextStream

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a request ended: "stop" (end-of-sequence token, stop token or stop string), "length" (max_tokens or the
context is full), "abort" (its caller gave up), "error" (its step failed)."""

Params = SamplingParams | Sequence[SamplingParams]
"""Settings for all prompts, or one for each."""


class Logprob(NamedTuple):
    """Log-probabilities of the model at one position, before temperature, penalties and bias.

    chosen: natural logarithm of the chosen token's probability.
    top: the most likely (token id, log-probability) pairs, best first, as many as `logprobs` asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(NamedTuple):
    """One token of one request, or the end of a request.

    index: number of the prompt in the caller's list.
    token_id: None for an end without a token ("abort", "error", or max_tokens 0).
    finish_reason: None until the completion's last event.
    time: `time.perf_counter()`, in seconds, when the host knew the token.
    logprob: None unless asked for.
    sample: number of the completion among the prompt's n, from 0.
    text: text that the event adds, if the engine had to look for stop strings; None: not decoded yet.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    token_id: int | None
    finish_reason: FinishReason | None
    time: float
    logprob: Logprob | None = None
    sample: int = 0
    text: str | None = None


class Streams(Protocol):
    """The interface of the engine that every phase's `load` returns: its `stream` yields token events."""

    def stream(self, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
        """Yield the token events of every prompt's completions. prompts: lists of token ids.

        The events of one completion come in order; completions may interleave. Each of a prompt's n
        completions ends with exactly one event that has a finish reason.

        params: for all prompts, or one for each.
        """


@dataclass
class Completion:
    """One generation, finished or still running.

    index, sample: number of the prompt, and of the completion among the prompt's n.
    prompt_ids: the prompt's token ids.
    token_ids: every generated token, the end-of-sequence or stop token that ended it included.
    text: the decoded output, without such a last token and cut before a stop string; empty when there was no
        tokenizer.
    finish_reason: None until the completion ends.
    logprobs: one for each token, or None when not asked for.
    arrival, times, finished: `time.perf_counter()` in seconds: when the request was made, when each token was
        known, and when the completion ended (None before).
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
        """Return the time to first token, in milliseconds; None without a token."""
        return (self.times[0] - self.arrival) * 1e3 if self.times else None

    @property
    def itl_ms(self) -> list[float]:
        """Return the inter-token latencies, in milliseconds: one fewer than there are tokens."""
        return [
            (later - earlier) * 1e3
            for earlier, later in zip(self.times, self.times[1:], strict=False)
        ]

    @property
    def e2e_ms(self) -> float | None:
        """Return the milliseconds from arrival to the last event; None before it."""
        return None if self.finished is None else (self.finished - self.arrival) * 1e3

    def add(self, event: TokenEvent) -> None:
        """Append the next event of this completion: token, time, log-probabilities, finish reason."""
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


def params_per_prompt(
    prompts: Sequence[Sequence[int]], params: Params
) -> list[SamplingParams]:
    """Return one `SamplingParams` for each prompt. params: one for all, or a sequence with one for each.

    Raises:
        UserError: `params` is neither, or a sequence of another length than `prompts`.
    """
    if not isinstance(prompts, Sized):
        raise UserError(f"prompts is {shown(prompts)}, but must be a list of prompts")
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sized) or any(
        not isinstance(one, SamplingParams) for one in params
    ):
        raise UserError(
            f"params is {shown(params)}, but must be SamplingParams, or a list of them"
        )
    if len(params) != len(prompts):
        raise UserError(
            f"params has {len(params)} entries, but must have one a prompt, {len(prompts)}"
        )
    return list(params)


def follow(
    engine: Streams,
    prompts: Sequence[Sequence[int]],
    params: Params,
    tokenizer: Tokenizer | None = None,
) -> Iterator[tuple[Completion, str]]:
    """Run `engine` on `prompts` (token ids); after each token event, yield (its completion, the text it
    adds).

    params: for all prompts, or one for each.
    tokenizer: decodes the texts; without one they are empty. `Completion.text` is set when the completion
        ends.
    """
    each = params_per_prompt(prompts, params)
    arrival = time.perf_counter()
    events = engine.stream(prompts, each)  # type: ignore[arg-type]  # refuses what is no prompt
    ids = [list(prompt) for prompt in prompts]
    completions = {
        (index, sample): Completion(
            index, sample, prompt, arrival, logprobs=None if settings.logprobs is None else []
        )
        for index, (prompt, settings) in enumerate(zip(ids, each, strict=True))
        for sample in range(settings.n)
    }
    streams = (
        {key: TextStream(tokenizer, each[key[0]], ids[key[0]]) for key in completions}
        if tokenizer
        else {}
    )
    pieces = defaultdict[tuple[int, int], list[str]](list)
    for event in events:
        key = event.index, event.sample
        completion = completions[key]
        completion.add(event)
        new = ""
        if key in streams:
            new = event.text or ""
            if event.text is None:
                _, new = streams[key].advance(event.token_id, event.finish_reason)
        pieces[key].append(new)
        if event.finish_reason is not None:
            completion.text = "".join(pieces[key])
        yield completion, new


def generate(
    engine: Streams,
    prompts: Sequence[Sequence[int]],
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
) -> list[Completion]:
    """Run `engine` on `prompts` (token ids) to the end; return the completions in (prompt, sample) order.

    params: for all prompts, or one for each. tokenizer: decodes the completions' texts; without one they stay
        empty.
    """
    found = {
        (one.index, one.sample): one for one, _ in follow(engine, prompts, params, tokenizer)
    }
    return [found[key] for key in sorted(found)]
