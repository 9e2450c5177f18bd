"""Random numbers of the draw: a function of a request's seed, its step and the token, without state.

Only int64, int32 and float32 are used, since Apple GPUs have no float64. Integer arithmetic wraps around.
"""

from __future__ import annotations

import torch
from torch import Tensor

HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B - (1 << 32)
"""The multipliers of `noise_bits`, as int32: those of lowbias32, https://github.com/skeeto/hash-prospector."""

NOISE_UNIT = 2.0**-31 * (1 - 2.0**-24)
"""The float32 just below 2**-31, so that even the largest of the noise's 31 bits stay below 1."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
"""The constants of SplitMix64, as int64: https://prng.di.unimi.it/splitmix64.c."""
_MASK = (1 << 64) - 1


def stream_key(seed: int) -> int:
    """Return the int64 key under which the random bits of a request with this seed are drawn.

    It is the first output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) with this seed. Output i is a
    function of seed + i * gamma, so two seeds that differ by a multiple of gamma share outputs; mixing the
    seed once makes that a coincidence of one in 2**64 a step.
    """
    z = (seed + _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    bits = z ^ (z >> 31)
    return bits - (1 << 64) if bits >> 63 else bits


def random_words(keys: Tensor, steps: Tensor) -> Tensor:
    """Return the two words of 32 random bits from which all noise of each pair (key, step) comes.

    They are the lower and the upper half of output number `step` of SplitMix64 seeded with `key`: a hash, so
    there is no state to keep or to order.

    keys, steps: int64 [B]. Returns int32 [B, 2].
    """
    z = keys + (steps + 1) * _GOLDEN_GAMMA
    # Torch's >> copies the sign bit; the hash needs zeros.
    z = (z ^ ((z >> 30) & (_MASK >> 30))) * _MIX_1
    z = (z ^ ((z >> 27) & (_MASK >> 27))) * _MIX_2
    z = z ^ ((z >> 31) & (_MASK >> 31))
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


def negative_exponentials(keys: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
    """Return -E for each row and token id, where the E are independent and exponentially distributed.

    E = -log(1 - v) for v = (31 random bits + fraction) / 2**31, uniform in (0, 1). -log(E) is a Gumbel number
    between -2.81 and 38.12. The smallest v matter most, since they make the rare tokens win: a fraction for
    each row gives them all of float32's digits.

    keys, steps: int64 [B]; ids: int32 [V]. Returns float32 [B, V], below 0.
    """
    lower, upper = random_words(keys, steps).chunk(2, dim=1)  # each [B, 1]
    bits = noise_bits(upper, lower, ids).float()  # [B, V]
    fraction = (((upper >> 9) & ((1 << 23) - 1)).float() + 0.5) * 2.0**-23  # [B, 1], in (0, 1)
    return torch.add(fraction * -NOISE_UNIT, bits, alpha=-NOISE_UNIT, out=bits).log1p_()
