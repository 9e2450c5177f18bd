"""The sampler's choice in two reads of the logits: the tokens of `common.sampling`, without its tensors.

In torch every step of the draw (subtract, divide, exponentiate, round, add up, search) reads and writes
`[B, V]`, in int64 at the end. Here one kernel reads the logits for their largest, a second one reads them
again and leaves one integer per chunk of the vocabulary, and a third looks into the one chunk per row in
which the token lies.

The weights are integers, whose sums are exact in any order, so cutting the vocabulary into chunks changes no
token. It stays the same token as torch's because each weight is computed as torch does it: subtraction,
IEEE division, and the `expf` of CUDA's own mathematics library (`tl.exp` is a faster approximation that
differs in the last bits).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from common.sampling.ops import FRACTION_BITS, WEIGHT_BITS
from common.sampling.rows import KEY, MIN_P, TEMPERATURE

CHUNK = 4096
_SCALE = tl.constexpr(float(1 << WEIGHT_BITS))
_FRACTION = tl.constexpr(FRACTION_BITS)
_ONE = tl.constexpr(1)
_TEMPERATURE, _MIN_P, _KEY = (tl.constexpr(column) for column in (TEMPERATURE, MIN_P, KEY))
# SplitMix64's constants as int64, see `common.sampling.ops`.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def shift_right(z, BITS: tl.constexpr):
    """A shift of an int64 that brings zeros in."""
    return (z >> BITS) & ((_ONE << (64 - BITS)) - 1)


@triton.jit
def random_bits(key, step):
    """`common.sampling.ops.random_bits` of one pair."""
    z = key + (step + 1) * _GAMMA
    z = (z ^ shift_right(z, 30)) * _MIX_1
    z = (z ^ shift_right(z, 27)) * _MIX_2
    z = z ^ shift_right(z, 31)
    return shift_right(z, 64 - _FRACTION)


@triton.jit
def sortable(x):
    """float32 -> int32 in the same order; both zeros are equal, and every NaN is the largest of all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def best_of(best, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Of a row's chunks: the largest logit and the first column that has it."""
    i = tl.arange(0, CHUNKS_PAD)
    packed = tl.max(tl.load(best + i, mask=i < CHUNKS, other=-(1 << 63)), axis=0)
    order = (packed >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def weigh(x, largest, hot, min_p, mask, NATIVE: tl.constexpr):
    """exp((x - largest) / temperature) as an integer multiple of 2**-40, and 0 below min_p."""
    scaled = tl.div_rn(x - largest, hot)
    weight = libdevice.exp(scaled) if NATIVE else tl.exp(scaled)
    return tl.where(mask & (weight >= min_p), (weight * _SCALE).to(tl.int64), 0)


@triton.jit
def best_kernel(best, logits, row_stride, V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """One program per row and chunk: order and column of its largest, packed so that a maximum finds both."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=-float("inf"))
    order, where = tl.max(sortable(x.to(tl.float32)), axis=0, return_indices=True)
    at = tl.minimum(chunk * BLOCK + where, V - 1)
    tl.store(best + row * CHUNKS + chunk, (order.to(tl.int64) << 32) | (0x7FFFFFFF - at))


@triton.jit
def winner_kernel(tokens, best, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """One program per row: the column of its largest."""
    row = tl.program_id(0)
    _, token = best_of(best + row * CHUNKS, CHUNKS, CHUNKS_PAD)
    tl.store(tokens + row, token)


@triton.jit
def mass_kernel(
    mass, best, logits, rows, floats, row_stride, float_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk: the sum of its weights. Greedy rows have none."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=-float("inf"))
    settings = floats + tl.load(rows + row) * float_stride
    hot = tl.load(settings + _TEMPERATURE)
    total = tl.zeros([], tl.int64)
    if hot > 0:
        largest, _ = best_of(best + row * CHUNKS, CHUNKS, CHUNKS_PAD)
        min_p = tl.load(settings + _MIN_P)
        total = tl.sum(weigh(x.to(tl.float32), largest, hot, min_p, column < V, NATIVE), axis=0)
    tl.store(mass + row * CHUNKS + chunk, total)


@triton.jit
def draw_kernel(
    tokens, mass, best, logits, rows, steps, floats, ints, row_stride, float_stride, int_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One program per row: the chunk that covers the row's random point, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(rows + row)
    hot = tl.load(floats + at * float_stride + _TEMPERATURE)
    largest, token = best_of(best + row * CHUNKS, CHUNKS, CHUNKS_PAD)
    if (hot > 0) & (tl.abs(largest) < float("inf")):  # NaN fails, too
        i = tl.arange(0, CHUNKS_PAD)
        masses = tl.load(mass + row * CHUNKS + i, mask=i < CHUNKS, other=0)
        total = tl.sum(masses, axis=0)
        bits = random_bits(tl.load(ints + at * int_stride + _KEY), tl.load(steps + row))
        low = (_ONE << _FRACTION) - 1
        point = bits * (total >> _FRACTION) + ((bits * (total & low)) >> _FRACTION)  # below the total
        chunk = tl.sum((tl.cumsum(masses, axis=0) <= point).to(tl.int32), axis=0)
        before = tl.sum(tl.where(i < chunk, masses, 0), axis=0)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + column, mask=column < V, other=-float("inf"))
        min_p = tl.load(floats + at * float_stride + _MIN_P)
        reached = tl.cumsum(weigh(x.to(tl.float32), largest, hot, min_p, column < V, NATIVE), axis=0)
        token = (chunk * BLOCK + tl.sum((before + reached <= point).to(tl.int32), axis=0)).to(tl.int64)
        token = tl.minimum(token, V - 1)
    tl.store(tokens + row, token)


def _dense(logits: Tensor) -> Tensor:
    """The same with columns side by side; some matrix products on CPUs leave them apart."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _best(logits: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Every chunk's best `[B, chunks]` int64, and how the vocabulary is cut. Few rows take more programs."""
    batch, vocab = logits.shape
    assert logits.stride(1) == 1
    block = min(CHUNK if batch > 4 else CHUNK // 4, max(16, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, block)
    best = torch.empty(batch, chunks, dtype=torch.int64, device=logits.device)
    best_kernel[(batch, chunks)](best, logits, logits.stride(0), V=vocab, BLOCK=block, CHUNKS=chunks)
    return best, {"CHUNKS": chunks, "CHUNKS_PAD": triton.next_power_of_2(chunks), "BLOCK": block}


def argmax_rows(logits: Tensor) -> Tensor:
    """`[B, V]` -> `[B]` int64, as `logits.argmax(1)`: of equals the first, and NaN counts as the largest."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        best, cut = _best(_dense(logits))
        winner_kernel[(len(logits),)](
            tokens, best, CHUNKS=cut["CHUNKS"], CHUNKS_PAD=cut["CHUNKS_PAD"], num_warps=1
        )
    return tokens


def draw_rows(
    logits: Tensor,  # [B, V], after edits and penalties
    rows: Tensor,  # [B] int64
    steps: Tensor,  # [B] int64, output tokens before this one
    floats: Tensor,  # [rows, 5] float32 and
    ints: Tensor,  # [rows, 3] int64: the settings in `common.sampling.rows.SamplerRows`
) -> Tensor:
    """One token per row, `[B]` int64: the sampler's, for rows without top-k and top-p.

    A row whose temperature is 0, or whose largest logit is not finite, gets its argmax.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits) == 0:
        return tokens
    logits = _dense(logits)
    best, cut = _best(logits)
    mass = torch.empty_like(best)
    vocab = logits.shape[1]
    stride, float_stride, int_stride = (x.stride(0) for x in (logits, floats, ints))
    mass_kernel[best.shape](
        mass, best, logits, rows, floats, stride, float_stride, V=vocab, NATIVE=logits.is_cuda, **cut
    )
    draw_kernel[(len(logits),)](
        tokens, mass, best, logits, rows, steps, floats, ints, stride, float_stride, int_stride,
        V=vocab, NATIVE=logits.is_cuda, **cut,
    )  # fmt: skip
    return tokens
