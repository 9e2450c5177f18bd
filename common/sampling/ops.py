"""The arithmetic of sampling on tensors: truncation, penalties, masks, log-probabilities.

A row's token must not depend on which other rows are in its batch. Floating-point sums break that: a sum is
rounded differently when the batch has another shape. So nothing here that chooses a token adds up floats.
The draw works on one token at a time and takes a maximum; only top-p needs sums, and for those probabilities
become 41-bit integers, whose sums are exact and the same in any order. Apple GPUs have no float64, so only
int64, int32 and float32 are used. Integer arithmetic wraps around.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WEIGHT_BITS = 40
"""A token's weight is exp((logit - largest) / temperature) as a multiple of 2**-40, so at most 2**40."""
FRACTION_BITS = 31
"""top_p is a multiple of 2**-31."""

CANDIDATES = 64
"""Likeliest tokens that are put in order for a request, which gets at most 20 of them."""
NAN_TOKEN = -1
"""In place of a token whose logit is NaN."""

_ONE = 0x3F800000  # the bits of float32 1.0
_NOT_SIGN = 0x7FFFFFFF
DIGIT_BITS = 15  # a key is below 2**30: two digits


def scale(fraction: Tensor, total: Tensor) -> Tensor:
    """Return fraction / 2**31 * total, rounded down, exactly.

    fraction: int64 in [0, 2**31]; total: int64 in [0, 2**62). The product would need 93 bits, so `total` is
    split.
    """
    low = (1 << FRACTION_BITS) - 1
    return fraction * (total >> FRACTION_BITS) + (fraction * (total & low) >> FRACTION_BITS)


def threshold(keys: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """Return each row's smallest key t such that the amounts of its keys <= t add up to at least `target`.

    This is selection by radix instead of a sort: a histogram of the upper 15 bits of the keys gives the bin
    in which the target is reached, a histogram of the lower 15 bits of that bin's keys gives the key.

    keys: int32 [B, V], at least 0 and below 2**30. amounts: int64 [B, V], at least 0. target: int64 [B, 1].
        Returns int32 [B, 1]; 2**30 - 1 where all amounts together do not reach the target.
    """
    bins = 1 << DIGIT_BITS

    def reach(digits: Tensor, amounts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mass = torch.zeros(keys.shape[0], bins, dtype=torch.int64, device=keys.device)
        # [B, bins]: of the first digit, the first two, ...
        mass.scatter_add_(1, digits, amounts).cumsum_(1)
        digit = torch.searchsorted(mass, target.contiguous()).clamp_(max=bins - 1)
        before = mass.gather(1, (digit - 1).clamp_(min=0)).masked_fill_(digit == 0, 0)
        return digit, target - before

    upper = (keys >> DIGIT_BITS).long()
    high, rest = reach(upper, amounts, target)
    low, _ = reach((keys & (bins - 1)).long(), torch.where(upper == high, amounts, 0), rest)
    return (high * bins + low).int()


def truncate(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return `weights` with 0 for the tokens that top-k, and then top-p among the rest, exclude.

    weights: float32 [B, V] in [0, 1], not normalized; NaN is kept.
    top_k: int64 [B, 1], at least 1; top_p: int64 [B, 1], p * 2**31, at least 1. None: no row uses it.

    Top-k keeps the k heaviest tokens and those that weigh the same as the k-th. Top-p keeps the heaviest
    tokens up to and including the one with which they reach the fraction p of all, and those that weigh the
    same as it. Source of top-p: Holtzman et al., "The curious case of neural text degeneration", arXiv
    1904.09751.
    """
    # The bits of floats that are not negative sort like the floats; the heaviest token, 1.0, gets key 0, and
    # so does NaN, of either sign.
    keys = (_ONE - (weights.view(torch.int32) & _NOT_SIGN)).clamp_(min=0)  # [B, V]
    if top_k is not None:
        ones = torch.ones(1, 1, dtype=torch.int64, device=keys.device).expand_as(keys)
        weights = torch.where(keys <= threshold(keys, ones, top_k), weights, 0.0)
    if top_p is not None:
        integers = (weights * float(1 << WEIGHT_BITS)).long()  # rounded down
        target = scale(top_p, integers.sum(1, keepdim=True))
        weights = torch.where(keys <= threshold(keys, integers, target), weights, 0.0)
    return weights


def forbid(logits: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
    """Set every logit whose bit in `allowed` is 0 to minus infinity, in place, and return `logits`.

    logits: float32 [B, V].
    allowed: int32 [M, ceil(V / 32)], bit i of word w for token 32 * w + i.
    positions: int64 [M], the rows of `logits` that are masked.
    """
    # Numpy takes all bits out in one pass, and no row is copied.
    if allowed.device.type == "cpu":
        octets = allowed.numpy().view(np.uint8)
        every = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little")
        for row, some in zip(positions.tolist(), every, strict=True):
            logits[row].masked_fill_(torch.from_numpy(some == 0), float("-inf"))
        return logits
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    barred = (allowed.unsqueeze(2) >> bits) & 1 == 0  # [B, words, 32]
    barred = barred.flatten(1)[:, : logits.shape[1]]  # [M, V]
    logits[positions] = logits[positions].masked_fill_(barred, float("-inf"))
    return logits


def penalize(
    logits: Tensor,
    prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Apply the three penalties in place and return `logits`.

    logits: float32 [B, V]; prompt: bool [B, V], token stands in the prompt; counts: int32 [B, V], how often
        it stands in the output; repetition, presence, frequency: float32 [B, 1].

    Repetition, for tokens of the prompt or the output: positive logits are divided by it, negative ones
    multiplied (Keskar et al., "CTRL", arXiv 1909.05858; the sign rule is Hugging Face's and vLLM's).
    Frequency: subtracted once for each time the token stands in the output. Presence: subtracted if it does
    at all (the OpenAI API).
    """
    present = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(prompt | present, repeated, logits))
    logits.sub_(frequency * counts)
    return logits.sub_(presence * present)


def raw_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of `tokens`, and the `top` most likely token ids with theirs, best first.

    logits: float32 [B, V]; tokens: int64 [B]. Returns float32 [B], int64 [B, top], float32 [B, top]. No bit
        of a row depends on the other rows: weights are added as integers, and of equal logits the lowest id
        is first.
    """
    largest = logits.amax(1, keepdim=True)  # [B, 1]
    weights = (logits - largest).exp_().mul_(float(1 << WEIGHT_BITS)).long()
    total = largest + weights.sum(1, keepdim=True).float().mul_(2.0**-WEIGHT_BITS).log_()
    chosen = (logits.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
    # `topk` orders equal logits by how many are wanted, which depends on the batch.
    ids = logits.topk(min(max(top, CANDIDATES), logits.shape[1]), dim=1).indices.sort(1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return chosen, ids.gather(1, order)[:, :top], values[:, :top] - total
