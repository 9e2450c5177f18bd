"""The arithmetic of sampling on tensors: noise, truncation, penalties, masks, log-probabilities.

A row's token must not depend on which other rows are in its batch. Floating-point sums break that: a sum is
rounded differently when the batch has another shape. So nothing here that chooses a token adds up floats.
The draw works on one token at a time and takes a maximum; only top-p needs sums, and for those probabilities
become 41-bit integers, whose sums are exact and the same in any order.

Only int64, int32 and float32 are used, since Apple GPUs have no float64. Integer arithmetic wraps around.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WEIGHT_BITS = 40
"""A token's weight is exp((logit - largest) / temperature) as a multiple of 2**-40, so at most 2**40."""

FRACTION_BITS = 31
"""top_p is a multiple of 2**-31."""

HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B - (1 << 32)
"""The multipliers of `noise_bits`, as int32: those of lowbias32, https://github.com/skeeto/hash-prospector."""

NOISE_UNIT = 2.0**-31 * (1 - 2.0**-24)
"""The float32 just below 2**-31, so that even the largest of the noise's 31 bits stay below 1."""

NAN_TOKEN = -1
"""In place of a token whose logit is NaN."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

_ONE = 0x3F800000  # the bits of float32 1.0
_NOT_SIGN = 0x7FFFFFFF
DIGIT_BITS = 15  # a key is below 2**30: two digits


def _signed(value: int) -> int:
    """Return the signed int64 (as an int) that has the lowest 64 bits of `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix64(state: int) -> int:
    """Return the first 64-bit output of SplitMix64 seeded with `state` (one step, then the mixing function).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of
        https://prng.di.unimi.it/splitmix64.c.
    """
    z = (state + _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int) -> int:
    """Return the int64 key under which the random bits of a request with this seed are drawn.

    Output i of SplitMix64 is a function of seed + i * gamma, so two seeds that differ by a multiple of gamma
    share outputs; mixing the seed once makes that a coincidence of one in 2**64 a step.
    """
    return _signed(splitmix64(seed & _MASK))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    # Torch's >> copies the sign bit; the hash needs zeros.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def random_words(keys: Tensor, steps: Tensor) -> Tensor:
    """Return the two words of 32 random bits from which all noise of each pair (key, step) comes.

    They are the lower and the upper half of output number `step` of SplitMix64 seeded with `key`: a hash, so
    there is no state to keep or to order.

    keys, steps: int64 [B]. Returns int32 [B, 2].
    """
    z = keys + (steps + 1) * _signed(_GOLDEN_GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    # The lower half first, as on every machine that torch runs on.
    return z.unsqueeze(1).view(torch.int32)


def noise_bits(upper: Tensor, lower: Tensor, ids: Tensor) -> Tensor:
    """Return 31 random bits for each token id: two rounds of multiply and xor-shift over a row's words.

    The shifts copy the sign bit, as int32's do; `x ^ (x >> s)` then maps a number and its complement to the
    same one, at least 0. So what is left are 31 bits, and they are uniform because `lower` is.

    upper, lower: int32 [B, 1], the row's words; ids: int32 [V]. Returns int32 [B, V] in [0, 2**31).
    """
    x = upper ^ ids  # [B, V]
    # One tensor for all three shifts: on a CPU a new one costs more than the shift.
    shifted = x >> 16
    x.bitwise_xor_(shifted).mul_(HASH_1)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted).bitwise_xor_(lower).mul_(HASH_2)
    torch.bitwise_right_shift(x, 16, out=shifted)
    return x.bitwise_xor_(shifted)


def dither(upper: Tensor) -> Tensor:
    """Return the fraction in (0, 1) that a row adds to all its `noise_bits`: float32, like int32 `upper`.

    The smallest numbers matter most, since they make the rare tokens win. With the fraction they have all of
    float32's digits instead of being multiples of 2**-31.
    """
    return (((upper >> 9) & ((1 << 23) - 1)).float() + 0.5) * 2.0**-23


def negative_exponentials(keys: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
    """Return -E for each row and token id, where the E are independent and exponentially distributed.

    E = -log(1 - v) for v = (bits + dither) / 2**31, uniform in (0, 1). -log(E) is a Gumbel number between
    -2.81 and 38.12.

    keys, steps: int64 [B]; ids: int32 [V]. Returns float32 [B, V], below 0.
    """
    lower, upper = random_words(keys, steps).chunk(2, dim=1)  # each [B, 1]
    bits = noise_bits(upper, lower, ids).float()  # [B, V]
    return torch.add(dither(upper) * -NOISE_UNIT, bits, alpha=-NOISE_UNIT, out=bits).log1p_()


def scale(fraction: Tensor, total: Tensor) -> Tensor:
    """Return fraction / 2**31 * total, rounded down, exactly.

    fraction: int64 in [0, 2**31]; total: int64 in [0, 2**62). The product would need 93 bits, so `total` is
    split.
    """
    low = (1 << FRACTION_BITS) - 1
    return fraction * (total >> FRACTION_BITS) + (fraction * (total & low) >> FRACTION_BITS)


def threshold(keys: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
    """Return the smallest key t for which the amounts of all keys <= t add up to at least `target`.

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
    """Return `weights` with 0 for the tokens that top-k, and then top-p of what is left, do not keep.

    weights: float32 [B, V] in [0, 1], or NaN, which is kept. top_k: int64 [B, 1], at least 1; top_p: int64
        [B, 1], p * 2**31, at least 1. None: no row uses it.

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
    """Set every logit whose bit is 0 to minus infinity, in place, and return `logits`.

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


def reported(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return `tokens`, `[B]` int64, with `NAN_TOKEN` where the logit of the chosen token is NaN.

    NaN wins every choice, so this is the case wherever a row has one that may be chosen.
    """
    return tokens.masked_fill(
        logits.gather(1, tokens.unsqueeze(1)).squeeze(1).isnan(), NAN_TOKEN
    )


def raw_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of `tokens`, and the `top` most likely token ids with theirs, best first.

    logits: float32 [B, V]; tokens: int64 [B]. Returns float32 [B], int64 [B, top], float32 [B, top]. Weights
    are added as integers, so that a row has the same bits in every batch.
    """
    largest = logits.amax(1, keepdim=True)  # [B, 1]
    weights = (logits - largest).exp_().mul_(float(1 << WEIGHT_BITS)).long()
    total = largest + weights.sum(1, keepdim=True).float().mul_(2.0**-WEIGHT_BITS).log_()
    chosen = (logits.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
    values, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    return chosen, ids, values - total
