"""The arithmetic of sampling on tensors: random bits, weights, truncation, penalties, log-probabilities.

A row's token must not depend on which other rows are in its batch. Floating-point sums break that: a sum is
rounded differently when the batch has another shape (and a parallel prefix sum may be rounded differently
each time). So probabilities become 41-bit integers first, and everything that adds them up (the total, the
cumulative sums, the mass above a threshold) is exact and the same in any order. Everything before that works
on one element at a time.

Only int64, int32 and float32 are used, since Apple GPUs have no float64. int64 arithmetic wraps around.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

WEIGHT_BITS: Final = 40
"""A token's weight is exp((logit - largest) / temperature) as a multiple of 2**-40, so at most 2**40."""

FRACTION_BITS: Final = 31
"""The uniform number and top_p are multiples of 2**-31."""

_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1

_ONE: Final = 0x3F800000  # the bits of float32 1.0
_KEY_BITS: Final = 30  # which is below 2**30
DIGIT_BITS: Final = 15  # so a key is two digits


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix64(state: int) -> int:
    """Return the first 64-bit output of SplitMix64 seeded with `state` (one step, then the mixing function).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants
    as in https://prng.di.unimi.it/splitmix64.c.
    """
    z = (state + _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int) -> int:
    """Turn a request's seed into the int64 under which its random bits are drawn.

    Output i of SplitMix64 is a function of seed + i * gamma, so two seeds that differ by a multiple of gamma
    share outputs; mixing the seed once makes that a coincidence of one in 2**64 a step.
    """
    return _signed(splitmix64(seed & _MASK))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> copies the sign bit; the hash needs zeros


def random_bits(keys: Tensor, steps: Tensor) -> Tensor:
    """Return `FRACTION_BITS` random bits for each pair (key, step): a hash, so no state to keep or to order.

    They are the top bits of output number `step` of SplitMix64 seeded with `key`.

    keys, steps: int64 [B]. Returns int64 [B] in [0, 2**31).
    """
    z = keys + (steps + 1) * _signed(_GOLDEN_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 64 - FRACTION_BITS)


def scale(fraction: Tensor, total: Tensor) -> Tensor:
    """Return fraction / 2**31 * total, rounded down, exactly.

    fraction: int64 in [0, 2**31]; total: int64 in [0, 2**62). The product would need 93 bits, so `total` is
    split.
    """
    low = (1 << FRACTION_BITS) - 1
    return fraction * (total >> FRACTION_BITS) + (fraction * (total & low) >> FRACTION_BITS)


def threshold(keys: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """Return the smallest key t for which the amounts of all keys <= t add up to at least `target`.

    Selection by radix instead of a sort: a histogram of the upper 15 bits of the keys tells in which bin the
    target is reached, a histogram of the lower 15 bits of that bin's keys tells at which key.

    keys: int32 [B, V], at least 0 and below 2**30. amounts: int64 [B, V], at least 0. target: int64 [B, 1].
    Returns int32 [B, 1]; 2**30 - 1 where all amounts together do not reach the target.
    """
    bins = 1 << DIGIT_BITS

    def reach(digits: Tensor, amounts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mass = torch.zeros(keys.shape[0], bins, dtype=torch.int64, device=keys.device)
        mass.scatter_add_(1, digits, amounts).cumsum_(1)  # [B, bins]: of the first digit, the first two, ...
        digit = torch.searchsorted(mass, target.contiguous()).clamp_(max=bins - 1)
        before = mass.gather(1, (digit - 1).clamp_(min=0)).masked_fill_(digit == 0, 0)
        return digit, target - before

    upper = (keys >> DIGIT_BITS).long()
    high, rest = reach(upper, amounts, target)
    low, _ = reach((keys & (bins - 1)).long(), torch.where(upper == high, amounts, 0), rest)
    return (high * bins + low).int()


def to_integers(weights: Tensor) -> Tensor:
    """Return float32 weights in [0, 1] as int64 multiples of 2**-40, rounded down."""
    return (weights * float(1 << WEIGHT_BITS)).long()


def truncate(weights: Tensor, integers: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return `integers` with 0 for the tokens that top-k, and then top-p of what is left, do not keep.

    Top-k keeps the k heaviest tokens and those that weigh the same as the k-th. Top-p keeps the heaviest
    tokens up to and including the one with which they reach the fraction p of all, and those that weigh the
    same as it. Source of top-p: Holtzman et al., "The curious case of neural text degeneration", arXiv
    1904.09751.

    weights: float32 [B, V] in [0, 1]; integers: int64 [B, V], the same weights as `to_integers` gives them.
    top_k: int64 [B, 1], at least 1; top_p: int64 [B, 1], p * 2**31, at least 1. None: no row uses it.
    """
    # The bits of floats that are not negative sort like the floats; the heaviest token, 1.0, gets key 0. The
    # clamp is for NaN: nobody uses such a row's result, but its keys become indices.
    keys = (_ONE - weights.view(torch.int32)).clamp_(0, (1 << _KEY_BITS) - 1)  # [B, V]
    if top_k is not None:
        ones = torch.ones(1, 1, dtype=torch.int64, device=keys.device).expand_as(keys)
        integers = torch.where(keys <= threshold(keys, ones, top_k), integers, 0)
    if top_p is not None:
        target = scale(top_p, integers.sum(1, keepdim=True))
        integers = torch.where(keys <= threshold(keys, integers, target), integers, 0)
    return integers


def draw(integers: Tensor, bits: Tensor) -> Tensor:
    """Choose one token a row with probability proportional to its weight, by inverting the cumulative sum.

    Of all tokens laid end to end, each as long as its weight, the one that covers the point bits / 2**31 of
    the way is chosen. `integers` is overwritten.

    integers: int64 [B, V], at least one above 0 in each row; bits: int64 [B] in [0, 2**31).
    Returns int64 [B].
    """
    cumulative = integers.cumsum_(1).contiguous()  # [B, V]
    point = scale(bits.unsqueeze(1), cumulative[:, -1:]).contiguous()  # [B, 1], below the total
    token = torch.searchsorted(cumulative, point, right=True).squeeze(1)  # the first with cumulative > point
    return token.clamp_(max=integers.shape[1] - 1)


def penalize(
    logits: Tensor, prompt: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Apply the three penalties in place and return `logits`.

    Repetition, for tokens of the prompt or the output: positive logits are divided by it, negative ones
    multiplied (Keskar et al., "CTRL", arXiv 1909.05858; the sign rule is Hugging Face's and vLLM's).
    Frequency: subtracted once for each time the token stands in the output. Presence: subtracted if it does
    at all (the OpenAI API).

    logits: float32 [B, V]; prompt: bool [B, V], token stands in the prompt; counts: int32 [B, V], how often
    it stands in the output; repetition, presence, frequency: float32 [B, 1].
    """
    present = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(prompt | present, repeated, logits))
    logits.sub_(frequency * counts)
    return logits.sub_(presence * present)


def raw_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the log-probabilities of `tokens`, and the `top` most likely token ids with theirs, best first.

    logits: float32 [B, V]; tokens: int64 [B]. Returns float32 [B], int64 [B, top], float32 [B, top]; None,
    None for top = 0. These sums are rounded as the batch's shape has it: two batches may differ in the last
    bits.
    """
    total = logits.logsumexp(1, keepdim=True)  # [B, 1]
    chosen = (logits.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
    if top == 0:
        return chosen, None, None
    values, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    return chosen, ids, values - total
