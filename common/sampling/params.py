"""The sampling settings of one request, checked once, when they are made.

Everything that reads a `SamplingParams` (the sampler, the finish rule, the schedulers) may rely on what is
checked here, so no later code checks it again.

Names and meanings follow vLLM's `SamplingParams`
(https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html); the limits of the presence and frequency
penalties, of `logprobs` and of `logit_bias` are those of the OpenAI API
(https://platform.openai.com/docs/api-reference/chat/create).

Every number and every length has a limit, since one request must not take memory or time from all others,
and since the numbers travel to the device in 64 bits at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from common.errors import UserError, boolean, integer, number, shown
from common.sampling.grammar import Grammar
from common.sampling.list_fields import MAX_INT as MAX_INT
from common.sampling.list_fields import (
    check_logit_bias,
    check_stop_strings,
    check_token_ids,
)

GREEDY_BELOW = 1e-5
"""Temperatures under this one mean greedy: dividing by them says nothing that the argmax does not."""

MAX_LOGPROBS = 20
SEED_BITS = 64

MAX_N = 128
"""Most completions of one prompt: each is a request of its own, made at once."""

NONE: tuple[()] = ()
"""The default of lists, compared by identity: a list that is given may be an array, which equals nothing."""

INTEGERS = {
    "min_tokens": (0, MAX_INT),
    "max_tokens": (0, MAX_INT),
    "top_k": (-1, MAX_INT),
    "n": (1, MAX_N),
}
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),  # a product with minus infinity must stay so
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Fields with their least and largest value."""


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request. Construction raises `UserError` for a value outside its limits.

    max_tokens: most tokens to generate, up to `MAX_INT`; 0 gives an empty text that ends with "length".
    min_tokens: this many tokens, at most max_tokens, are generated before an end-of-sequence token, a stop
        token or a stop string may end the request.
    temperature: 0 (anything below `GREEDY_BELOW`) is greedy: the most likely token, exactly. At most 100.
    top_k: keep the k most likely tokens; 0 or -1 keeps all. At most `MAX_INT`.
    top_p: keep the most likely tokens up to the one whose probability makes the sum p. 0 to 1; 0 is greedy.
    min_p: keep the tokens at least min_p times as likely as the most likely one. 0 to 1.
    repetition_penalty: above 1 makes tokens of prompt and output less likely. From 0.01 to 100.
    presence_penalty: subtracted from the logit of every token of the output. From -2 to 2.
    frequency_penalty: subtracted once for each time the token stands in the output; limits as above.
    seed: the same seed gives the same tokens, whatever else runs beside the request; None draws a fresh one.
        So does -1, as with vLLM and Ollama. Of other numbers the lowest `SEED_BITS` bits count.
    stop: the text ends before the first of these strings to be completed. At most `MAX_STOPS`, of 1 to
        `MAX_STOP_CHARACTERS` characters each.
    stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens. At most
        `MAX_STOP_TOKEN_IDS`, each 0 to `MAX_INT`.
    ignore_eos: an end-of-sequence token is a token like any other (for benchmarks).
    logprobs: None, or report log-probabilities of each token and of so many likely ones, to `MAX_LOGPROBS`.
    logit_bias: added to the logits of these token ids. At most `MAX_BIASED_TOKENS` of ids 0 to `MAX_INT`,
        each bias at most `MAX_LOGIT_BIAS` and at least its negative.
    n: completions for each prompt, 1 to `MAX_N`.
    grammar: the language of the output, for an engine that masks tokens (phase 12). Where the output may end,
        an end-of-sequence token may be chosen, and nowhere else; where it cannot go on, the end comes before
        `min_tokens` and in spite of `ignore_eos`. What `max_tokens` or a stop cuts may be incomplete.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = NONE
    stop_token_ids: tuple[int, ...] = NONE
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    n: int = 1
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)  # the dataclass is frozen for all others
        for name, (low, high) in INTEGERS.items():
            put(name, integer(name, getattr(self, name), low=low, high=high))
        for name, (least, most) in NUMBERS.items():
            put(name, number(name, getattr(self, name), low=least, high=most))
        put("top_k", max(self.top_k, 0))
        if self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens, {self.max_tokens}"
            raise UserError(f"min_tokens is {self.min_tokens}, but must be {limit}")
        if self.seed is not None:
            seed = integer("seed", self.seed)
            put("seed", None if seed == -1 else seed % (1 << SEED_BITS))
        if self.stop is not NONE:
            put("stop", check_stop_strings(self.stop))
        if self.stop_token_ids is not NONE:
            put("stop_token_ids", check_token_ids(self.stop_token_ids))
        boolean("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            put("logprobs", integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS))
        if not isinstance(self.logit_bias, dict) or self.logit_bias:
            put("logit_bias", check_logit_bias(self.logit_bias))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UserError(f"grammar is {shown(self.grammar)}, but must be a Grammar or None")

    @property
    def greedy(self) -> bool:
        """Return True if each token is the most likely one: `top_k` 1 and `top_p` 0 leave no other, too."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalized(self) -> bool:
        """Return True if the settings have penalties, which need counts of prompt and output tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def seed_of(self, sample: int) -> int | None:
        """Return the seed of completion number `sample` (0 to n - 1), or None when the request has none.

        It is seed + sample, so that the n completions differ, as in vLLM.
        """
        return None if self.seed is None else (self.seed + sample) % (1 << SEED_BITS)
