"""The sampler: from the logits of all running requests to one token each, at once and on the device.

docs/sampling.md tells what happens to a row of logits, in which order and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.events import Logprob
from common.sampling import ops
from common.sampling.rows import (
    FREQUENCY,
    KEY,
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TRUNCATION,
    Draw,
    Feature,
    Plan,
    SamplerRows,
)

__all__ = ["Feature", "HostSampled", "Plan", "Sampled", "Sampler"]


class Sampled(NamedTuple):
    """The chosen tokens and, if a row asked, log-probabilities before temperature and penalties.

    tokens: int64 [B]. logprobs: float32 [B], of the chosen tokens. top_ids int64 [B, N], top_logprobs float32
    [B, N]: the most likely tokens, best first, where N is the largest number that a row asked for.
    wanted: as in `Plan`.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    wanted: tuple[int, ...] | None = None

    def logprob(self, place: int) -> Logprob | None:
        """Return what the row at `place` in the batch asked for. Waits for the device; see `to_host`."""
        if self.wanted is None or self.logprobs is None or self.wanted[place] < 0:
            return None
        count = self.wanted[place]
        top: tuple[tuple[int, float], ...] = ()
        if count > 0 and self.top_ids is not None and self.top_logprobs is not None:
            ids, values = self.top_ids[place, :count].tolist(), self.top_logprobs[place, :count].tolist()
            top = tuple(zip(ids, values, strict=True))
        return Logprob(float(self.logprobs[place]), top)

    def to_host(self) -> HostSampled:
        """Start copying to the host, without waiting for it."""
        return HostSampled(self)


class HostSampled:
    """A `Sampled` on its way to the host."""

    def __init__(self, sampled: Sampled) -> None:
        """Queue the copies behind the device's work. With CUDA only pinned memory lets the host go on."""
        tokens, logprobs, ids, values, wanted = sampled
        self._arrived: torch.Event | None = None
        if tokens.is_cuda:
            tokens = _pinned_copy(tokens)
            logprobs, ids, values = (None if t is None else _pinned_copy(t) for t in (logprobs, ids, values))
            self._arrived = torch.cuda.current_stream(sampled.tokens.device).record_event()
        self._sampled = Sampled(tokens, logprobs, ids, values, wanted)

    def get(self) -> list[tuple[int, Logprob | None]]:
        """Wait for the copies; returns the token and the log-probabilities of each place in the batch."""
        if self._arrived is not None:
            self._arrived.synchronize()
        sampled, tokens = self._sampled, self._sampled.tokens.tolist()
        if sampled.wanted is None:
            return [(token, None) for token in tokens]
        return [(token, sampled.logprob(place)) for place, token in enumerate(tokens)]


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Sampler(SamplerRows):
    """Chooses the next tokens of a batch whose requests have their settings in `SamplerRows`.

    The token of a row depends on its logits, its settings and its own past, and on nothing else in the batch.
    """

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_host: Sequence[int],
        steps: Tensor,
        plan: Plan | None = None,
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Choose the next token of each row and count it for the penalties.

        With a plan given, this only queues work for the device. With `plan.for_any_rows()` a CUDA graph can
        capture it.

        logits: float32 [B, V]; left as they are.
        rows: int64 [B] on the device, the row of the request at each place in the batch.
        rows_host: the same on the host, for the plan.
        steps: int64 [B] on the device, how many tokens each request has generated before this one.
        plan: `plan(rows_host)`; made here if missing.
        """
        if plan is None:
            plan = self.plan(rows_host)
        adjusted = self._adjust(logits, rows, steps, plan)
        tokens = self.choose(adjusted, rows, steps, plan)
        if Feature.PENALTIES in plan.features:
            # Rows without penalties are counted too; nothing reads their counts.
            place = rows * self.vocab_size + tokens
            self.counts.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
        if plan.wanted is None:
            return Sampled(tokens)
        return Sampled(tokens, *ops.raw_logprobs(logits, tokens, max(plan.wanted)), plan.wanted)

    def choose(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """Return one token for each row of the adjusted `logits [B, V]`: `[B]` int64.

        Where it is done by kernels, the tokens have to be the same.
        """
        best = logits.argmax(1)  # of equals the first
        return self._draw(logits, best, rows, steps, plan.draws) if plan.draws else best

    def _adjust(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """Return the logits after bias, min_tokens and penalties; a copy where any row needs them."""
        if not plan.features & (Feature.EDITS | Feature.PENALTIES):
            return logits
        logits = logits.clone()
        if Feature.EDITS in plan.features:
            active = steps.unsqueeze(1) < self.edit_until[rows]  # [B, E]
            logits.scatter_add_(1, self.edit_ids[rows], torch.where(active, self.edit_values[rows], 0.0))
        if Feature.PENALTIES in plan.features:
            floats = self.floats[rows].unsqueeze(2)  # [B, 5, 1]
            penalties = floats[:, REPETITION], floats[:, PRESENCE], floats[:, FREQUENCY]  # each [B, 1]
            ops.penalize(logits, self.in_prompt[rows], self.counts[rows], *penalties)
        return logits

    def _draw(
        self, logits: Tensor, best: Tensor, rows: Tensor, steps: Tensor, draws: Sequence[Draw]
    ) -> Tensor:
        """Return `best` with a random token in its place for each row that has a temperature."""
        tokens = best.clone()
        for places, features in draws:
            at = rows[places]
            tokens[places] = self._draw_some(logits[places], best[places], at, steps[places], features)
        return tokens

    def _draw_some(
        self, logits: Tensor, best: Tensor, rows: Tensor, steps: Tensor, features: Feature
    ) -> Tensor:
        floats, ints = self.floats[rows], self.ints[rows]
        temperature = floats[:, TEMPERATURE, None]  # [B, 1]
        largest = logits.gather(1, best.unsqueeze(1))  # [B, 1]
        # Subtract first: then a small temperature divides differences, all at most 0, and nothing overflows.
        weights = (logits - largest).div_(temperature).exp_()  # [B, V] in [0, 1]
        integers = ops.to_integers(weights)  # [B, V]
        if Feature.MIN_P in features:
            integers = torch.where(weights >= floats[:, MIN_P, None], integers, 0)
        if features & TRUNCATION:
            top_k = ints[:, TOP_K, None] if Feature.TOP_K in features else None
            top_p = ints[:, TOP_P, None] if Feature.TOP_P in features else None
            integers = ops.truncate(weights, integers, top_k, top_p)
        drawn = ops.draw(integers, ops.random_bits(ints[:, KEY], steps))
        # What was drawn means nothing where the largest logit is NaN or infinite, or the temperature is 0 (a
        # plan for any rows brings greedy ones here too); the argmax is always a token.
        usable = (temperature > 0) & largest.isfinite()
        return torch.where(usable.squeeze(1), drawn, best)
