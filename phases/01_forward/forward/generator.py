"""The simplest way to generate: run the whole sequence, sample one token, append it, start over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from common.errors import NotANumber, UserError
from common.events import Params, TokenEvent, params_per_prompt
from common.rules import NO_GRAMMARS, check_prompt, finish_reason, output_limit
from common.sampling.ops import NAN_TOKEN
from common.sampling.params import SamplingParams
from common.sampling.sampler import Sampled, Sampler
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.model import Model


class Generator:
    """Serves one request after another, one token after another, and stores nothing between tokens.

    Args:
        model: computes the hidden states.
        tokenizer: needed for stop strings only.
        rows: number of requests whose tokens are sampled together: 1, unless a subclass serves batches.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None = None, *, rows: int = 1
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sampler = Sampler(rows, model.config.vocab_size, model.device)
        self.row = torch.zeros(1, dtype=torch.int64, device=model.device)

    @classmethod
    def load(
        cls,
        model: str | Path | Model,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | None = None,
    ) -> Self:
        """Return this phase's engine for a model's name or a loaded model.

        device, dtype: where to load it and in which format, such as ``cpu``, ``float32``. tokenizer: for stop
            strings; None: the model folder's, if needed.
        """
        return cls(load_model(model, device=device, dtype=dtype), tokenizer)

    def stream(self, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
        """Yield the token events of each prompt's completions, one prompt after another.

        prompts: token ids. params: for all prompts, or one for each.

        Raises:
            UserError: a prompt or its parameters cannot be served; before anything is computed.
        """
        each = params_per_prompt(prompts, params)
        for prompt, settings in zip(prompts, each, strict=True):
            check_prompt(
                prompt,
                self.model.config.vocab_size,
                self.model.max_len,
                settings,
                has_tokenizer=self.tokenizer is not None,
            )
            if settings.grammar is not None:
                raise UserError(NO_GRAMMARS)
        # Also numpy's arrays.
        return self._stream([list(map(int, prompt)) for prompt in prompts], each)

    def _stream(
        self, prompts: list[list[int]], each: list[SamplingParams]
    ) -> Iterator[TokenEvent]:
        for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            for sample in range(params.n):
                yield from self._one(index, sample, prompt, params)

    def _one(
        self, index: int, sample: int, prompt: list[int], params: SamplingParams
    ) -> Iterator[TokenEvent]:
        """Yield one event a token of a completion; the last one has the reason for its end.

        index: the prompt's number. sample: which of its `n` completions. prompt: token ids. params: checked
            before.

        `output_limit` gives the most tokens. If it is 0, one event has no token and the reason "length".
        Otherwise `begin` is called once, and `self.sampler.set_row(0, ...)` gets `params`, the prompt,
        `eos_ids` (`self.model.config.eos_token_ids`) and `sample`. For token n, counted from 0,
        `_next(tokens, n)` returns a `Sampled`: `int(sampled.for_host[0])` is the token, which `refuse_nan`
        checks, and `sampled.logprob(0)` belongs to its event.

        `finish_reason` gets the number of tokens generated so far and returns why this token is the last one,
        or None. With stop strings and a tokenizer, `TextStream.advance(token, reason)` decides: it returns
        the reason, which is "stop" if the text has ended, and the piece of text for the event.
        """
        tokens, eos = list(prompt), self.model.config.eos_token_ids
        limit = output_limit(len(prompt), params, self.model.max_len)
        if limit == 0:
            yield TokenEvent(index, None, "length", time.perf_counter(), sample=sample)
            return
        self.begin(len(prompt), limit)
        self.sampler.set_row(0, params, prompt, eos_ids=eos, sample=sample)
        text = (
            TextStream(self.tokenizer, params, prompt)
            if self.tokenizer and params.stop
            else None
        )
        reason = None
        while reason is None:
            sampled = self._next(tokens, len(tokens) - len(prompt))
            token = int(sampled.for_host[0])  # here the host waits for the device
            refuse_nan(token, index)
            tokens.append(token)
            reason = finish_reason(token, len(tokens) - len(prompt), params, eos, limit)
            piece = None
            if text is not None:
                reason, piece = text.advance(token, reason)
            yield TokenEvent(
                index, token, reason, time.perf_counter(), sampled.logprob(0), sample, piece
            )

    @torch.inference_mode()  # not around the loop: a generator would leave it switched on for its consumer
    def _next(self, tokens: list[int], step: int) -> Sampled:
        hidden = self.last_hidden(tokens)
        steps = torch.full_like(self.row, step)
        plan = self.sampler.plan([0])
        return self.sampler.sample(self.model.logits(hidden), self.row, steps, plan)

    def begin(self, prompt_len: int, limit: int) -> None:
        """Prepare for a request of ``prompt_len`` tokens and at most ``limit`` more: here, do nothing."""

    def last_hidden(self, tokens: list[int]) -> Tensor:
        """Return the last token's hidden state ``[1, hidden]``: here, by computing all of `tokens`.

        The model is called with ids and positions ``[S]`` on its device, and a new `RecomputeAttention`.
        """
        ids = torch.tensor(tokens, device=self.model.device)  # [S]
        positions = torch.arange(len(tokens), device=self.model.device)
        return self.model(ids, positions, RecomputeAttention())[-1:]


def refuse_nan(token: int, index: int) -> None:
    """Raise `NotANumber` if a sampled `token` says that its logits were NaN. index: the prompt's number."""
    if token == NAN_TOKEN:
        raise NotANumber(f"request {index}: the model's logits are not a number (NaN)")
