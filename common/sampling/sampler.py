"""The sampler: from the logits of all running requests to one token each, at once and on the device.

docs/sampling.md lists the operations on a row of logits, in their order and with reasons.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from common.events import Logprob
from common.sampling import ops
from common.sampling.metadata import RADIX, SamplingFlags, SamplingMetadata
from common.sampling.noise import negative_exponentials
from common.sampling.rows import (
    FREQUENCY,
    KEY,
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplerRows,
)

_LARGEST = torch.finfo(torch.float32).max


class Sampled(NamedTuple):
    """The chosen tokens and, if a row asked, log-probabilities before temperature and penalties.

    tokens: int64 [B], all in the vocabulary: the input of the next step on the device.
    for_host: the same tokens, but `ops.NAN_TOKEN` (-1) where logits are NaN.
    logprobs: of the chosen tokens, float32 [B]; then the ids of the most likely tokens, best first, int64 [B,
        N], and their log-probabilities, float32 [B, N]. N is the largest number that a row asked for.
    wanted: for each position how many top log-probabilities it asked for, -1 for none; None: no row asked.
    """

    tokens: Tensor
    for_host: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None
    wanted: tuple[int, ...] | None = None

    def logprob(self, place: int) -> Logprob | None:
        """Return the log-probabilities at position `place` of the batch; None if its request wanted none.

        Waits for the device; making a `HostSampled` does not.
        """
        if self.wanted is None or self.logprobs is None or (count := self.wanted[place]) < 0:
            return None
        chosen, ids, values = self.logprobs
        top = zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True)
        return Logprob(float(chosen[place]), tuple(top))


class TokenBitmask(NamedTuple):
    """The tokens that may be chosen at some positions of a batch; at the other positions all may be.

    words: int32 [M, ceil(V / 32)] on the device; bit i of word w says that token 32 * w + i may be chosen. A
        caller must set at least one bit in each row: otherwise a forbidden token is chosen.
    positions: int64 [M] on the device, ascending.
    """

    words: Tensor
    positions: Tensor


class HostSampled:
    """Copies a step's `Sampled` to the host: construction starts the copy, `get` waits for it."""

    def __init__(self, sampled: Sampled) -> None:
        """Queue copies of `sampled` after the device's work. With CUDA (pinned memory) this does not wait."""
        tokens, logprobs = sampled.for_host, sampled.logprobs
        self._arrived: torch.Event | None = None
        if tokens.is_cuda:
            tokens = pinned_copy(tokens)
            if logprobs is not None:
                chosen, ids, values = map(pinned_copy, logprobs)
                logprobs = chosen, ids, values
            self._arrived = torch.cuda.current_stream(sampled.tokens.device).record_event()
        self._sampled = Sampled(tokens, tokens, logprobs, sampled.wanted)

    def get(self) -> list[tuple[int, Logprob | None]]:
        """Wait for the copies; return the token and the log-probabilities of each position in the batch.

        The token is `ops.NAN_TOKEN` where logits are NaN; log-probabilities are None where none were wanted.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        sampled, tokens = self._sampled, self._sampled.tokens.tolist()
        if sampled.wanted is None:
            return list(zip(tokens, repeat(None)))
        return [(token, sampled.logprob(place)) for place, token in enumerate(tokens)]


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in the host's pinned memory, into which a copy of a CUDA tensor is queued."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class SamplerBackend:
    """Chooses one token for each row of logits for a `Sampler`, here by torch.

    Subclasses choose the same tokens by kernels, or from logits that are spread over ranks.

    In all methods, logits: `[B, V]`. rows, steps: `[B]` int64, each request's row of settings and its number
    of tokens generated before. plan: how the batch is sampled. masked: True if the step has bitmasks.
    """

    def whole(
        self, sampler: Sampler, logits: Tensor, plan: SamplingMetadata, masked: bool
    ) -> Tensor:
        """Return the logits of the whole vocabulary, `[B, V]`; over ranks they may have to be gathered."""
        return logits

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: TokenBitmask) -> None:
        """Set the logits `[B, V]` of all tokens that `allowed` excludes to minus infinity, in place."""
        parts = (torch.split(some, sampler.at_once) for some in allowed)
        for part in zip(*parts, strict=True):
            ops.forbid(logits, *part)

    def choose(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        masked: bool,
    ) -> Tensor:
        """Return one token for each row of the adjusted logits: `[B]` int64."""
        if not plan.draws:
            return logits.argmax(1)  # of equals the first
        tokens = torch.empty_like(rows)
        for positions, features in plan.draws:
            some = logits[positions]
            if SamplingFlags.RANDOM in features:
                tokens[positions] = self.draw(
                    sampler, some, rows[positions], steps[positions], features
                )
            else:
                tokens[positions] = some.argmax(1)
        return tokens

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `tokens [B]` for the host: `ops.NAN_TOKEN` where the chosen one's logit `[B, V]` is NaN."""
        chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens.masked_fill(chosen.isnan(), ops.NAN_TOKEN)  # NaN wins every choice

    def draw(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        features: SamplingFlags,
    ) -> Tensor:
        """Return a random token for each row that has a temperature, and the argmax for others: `[B]` int64.

        features: operations to apply, such as top-p.

        The Gumbel-max trick takes the argmax of logit / temperature - log(E). This takes the argmax of its
        exponential, weight / E, as the largest -E / weight, which is minus infinity for a weight of 0.
        """
        weights = sampler.weigh(logits, rows, features)  # [B, V]
        noise = negative_exponentials(sampler.ints[rows, KEY], steps, sampler.ids)  # [B, V]
        # Of equals the first, and NaN is the largest.
        return noise.div_(weights).max(1).indices


TORCH = SamplerBackend()


class Sampler(SamplerRows):
    """Chooses the next tokens of a batch of requests whose settings are in the rows of `SamplerRows`.

    The token of a row depends on its logits, settings and past, and on nothing else in the batch.

    sampler_backend: computes the choice; a later phase replaces it by kernels, or by a choice over ranks.
    """

    sampler_backend: SamplerBackend = TORCH

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        allowed: TokenBitmask | None = None,
    ) -> Sampled:
        """Return the next token of each row as a `Sampled`, and count it for the penalties.

        logits: float32 [B, V]; masked in place unless edits, penalties or log-probabilities need a copy.
        rows: int64 [B] on the device, the row of the request at each position in the batch.
        steps: int64 [B] on the device, how many tokens each request has generated before this one.
        plan: what `plan` returns for the same rows. allowed: the masks; None: every token may be chosen.

        This only queues work for the device, and with `plan.for_any_rows()` a CUDA graph can capture it. A
        row without penalties may stand at several positions of the batch, with different steps (several
        tokens of one request): each is chosen with its own step.
        """
        backend, masked = self.sampler_backend, allowed is not None
        logits = backend.whole(self, logits, plan, masked)
        adjusted = self._adjust(logits, rows, steps, plan, allowed)
        tokens = backend.choose(self, adjusted, rows, steps, plan, masked)
        if SamplingFlags.PENALTIES in plan.features:
            self.history.add(rows, tokens)
        for_host = backend.report(adjusted, tokens)
        if plan.wanted is None:
            return Sampled(tokens, for_host)
        size, most = self.at_once, max(plan.wanted)
        some = zip(torch.split(logits, size), torch.split(tokens, size), strict=True)
        parts = zip(*[ops.raw_logprobs(*part, most) for part in some], strict=True)
        chosen, ids, values = map(torch.cat, parts)
        return Sampled(tokens, for_host, (chosen, ids, values), plan.wanted)

    def weigh(self, logits: Tensor, rows: Tensor, features: SamplingFlags) -> Tensor:
        """Return exp((logit - largest) / temperature), 0 where truncation excludes a token: float32 `[B, V]`.

        logits: `[B, V]`, in half precision if graphs leave them so. rows: int64 `[B]`, rows of settings.
        features: which truncations to apply.

        NaN means that a token wins without a draw, the first of several: the largest logit of a greedy row
        (which `for_any_rows` includes here), and logits that are NaN or infinite.
        """
        floats = self.floats[rows]
        ints = self.ints[rows]
        logits = logits.float()
        weights = self.weights(logits, logits.amax(1, keepdim=True), rows)
        if SamplingFlags.MIN_P in features:
            weights = torch.where(weights < floats[:, MIN_P, None], 0.0, weights)
        if features & RADIX:
            top_k = ints[:, TOP_K, None] if SamplingFlags.TOP_K in features else None
            top_p = ints[:, TOP_P, None] if SamplingFlags.TOP_P in features else None
            weights = ops.truncate(weights, top_k, top_p)
        return weights

    def weights(self, logits: Tensor, largest: Tensor, rows: Tensor) -> Tensor:
        """Return exp((logit - largest) / temperature), float32 `[B, V]`; NaN: the largest of a greedy row.

        logits: float32 `[B, V]`. largest: `[B, 1]`, of each row of logits. rows: int64 `[B]`.
        """
        # Where a logit is NaN it alone shall stay NaN.
        largest = largest.nan_to_num(_LARGEST, math.inf, -math.inf)
        # Subtract first: then a small temperature scales differences, all at most 0, and nothing overflows.
        # The reciprocal of temperature 0 is infinite: the largest becomes NaN, and the others' weights 0.
        colder = self.floats[rows, TEMPERATURE, None].reciprocal()  # [B, 1]
        return (logits - largest).mul_(colder).exp_()

    def _adjust(
        self,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        allowed: TokenBitmask | None,
    ) -> Tensor:
        """Return the logits `[B, V]` after mask, bias, min_tokens and penalties; masks alone: in place.

        rows, steps: int64 `[B]`, each request's row of settings and number of tokens generated before. plan:
            which edits there are. allowed: bitmasks of allowed tokens; None: all are allowed.
        """
        edited = bool(plan.features & (SamplingFlags.EDITS | SamplingFlags.PENALTIES))
        if edited or (allowed is not None and plan.wanted is not None):
            logits = logits.clone()
        if allowed is not None:
            self.sampler_backend.forbid(self, logits, allowed)
        if plan.edits is not None:
            tokens, values, until, at = plan.edits
            values = torch.where(steps[at] < until, values, 0.0)
            logits.index_put_((at, tokens), values, accumulate=True)
        for positions in plan.penalties:
            at, some = rows[positions], logits[positions]
            floats = self.floats[at].unsqueeze(2)  # [B, 5, 1]
            # each [B, 1]
            penalties = (floats[:, REPETITION], floats[:, PRESENCE], floats[:, FREQUENCY])
            logits[positions] = ops.penalize(
                some, self.history.in_prompt[at], self.history.counts[at], *penalties
            )
        return logits
