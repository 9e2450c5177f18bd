"""The sampler's choice in one read of the logits: the tokens of `common.sampling`, without its tensors.

In torch every step of the draw (hash, logarithm, subtract, scale, exponentiate, divide) reads and writes
`[B, V]`. Here one kernel reads the logits once: each program takes a chunk of a row's vocabulary, makes the
noise of its tokens in registers, and stores the chunk's largest logit and its sampled token. A second, small
kernel compares the chunks of a row.

The noise's bits are those of torch, exactly. Its logarithm and the weights agree to some 1e-6, so the tokens
are the same but where two of them are closer than that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from common.sampling.metadata import TRUNCATION, SamplingFlags, SamplingMetadata
from common.sampling.noise import HASH_1, HASH_2, NOISE_UNIT
from common.sampling.ops import NAN_TOKEN
from common.sampling.rows import KEY, TEMPERATURE
from common.sampling.sampler import Sampler, SamplerBackend

CHUNK = 4096
_INF = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_LAST = tl.constexpr((1 << 31) - 1)
_ONE = tl.constexpr(1)
_TEMPERATURE, _KEY = (tl.constexpr(column) for column in (TEMPERATURE, KEY))
# The constants of `common.sampling.noise`; SplitMix64's as int64.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_HASH_1 = tl.constexpr(HASH_1)
_HASH_2 = tl.constexpr(HASH_2)
_UNIT = tl.constexpr(NOISE_UNIT)


@triton.jit
def shift_right(z, BITS: tl.constexpr):
    """Return the int64 `z` shifted right by BITS, with zeros from the left."""
    return (z >> BITS) & ((_ONE << (64 - BITS)) - 1)


@triton.jit
def random_words(key, step):
    """Return the random number of a pair (key, step) as two words: lower and upper half.

    They are output number `step` of SplitMix64 seeded with `key`. key, step: int64.
    """
    z = key + (step + 1) * _GAMMA
    z = (z ^ shift_right(z, 30)) * _MIX_1
    z = (z ^ shift_right(z, 27)) * _MIX_2
    z = z ^ shift_right(z, 31)
    return z.to(tl.int32), (z >> 32).to(tl.int32)


@triton.jit
def negative_exponentials(lower, upper, ids, NATIVE: tl.constexpr):
    """Return exponential noise, negated, -E for each of the int32 token `ids` of one row.

    lower, upper: the row's random words, int32. NATIVE: use the GPU's fast logarithm. E = -log(1 - v), v
        uniform in (0, 1). For v below 1/8, the power series of log(1 - v) is used, with a relative error
        below 1e-7: there the GPU's logarithm, and 1 - v itself, have lost digits. Above, the GPU's fast
        logarithm has an error of 2e-6.
    """
    x = upper ^ ids
    x = (x ^ (x >> 16)) * _HASH_1
    x = (x ^ (x >> 15) ^ lower) * _HASH_2
    x = x ^ (x >> 16)
    dither = (((upper >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * (1 / (1 << 23))
    v = (x.to(tl.float32) + dither) * _UNIT
    series = 1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v * (1 / 7)))))
    logarithm = libdevice.fast_log2f(1 - v) * _LN_2 if NATIVE else tl.log(1 - v)
    return tl.where(v < 1 / 8, -v * (1 + v * series), logarithm)


@triton.jit
def first_best(x, ids):
    """Return the largest of `x`, and the smallest of the `ids` that have it; NaN counts as the largest."""
    nan = x != x
    any_nan = tl.max(nan.to(tl.int32)) > 0
    largest = tl.max(tl.where(nan, -_INF, x))
    at = tl.min(tl.where(tl.where(any_nan, nan, x == largest), ids, _LAST))
    return tl.where(any_nan, float("nan"), largest), at


@triton.jit
def chunk_race(x, column, hot, key, step, first, NATIVE: tl.constexpr):
    """Sample a token from one chunk of a row; return the largest logit, and the token's score and column.

    x: the chunk's logits. column: their columns. first: the token id of column 0. hot: the row's
        temperature, 0: greedy. key, step: int64, of the row's random numbers. NATIVE: use the GPU's fast
        logarithm.

    A token's score is -E / weight: -E is its noise (`negative_exponentials`), and its weight is
    exp((logit - largest of the chunk) / temperature), which never overflows and needs no other chunk. The
    sampled token has the largest score, and of equals the smallest column. In a greedy row, or where the
    chunk's largest logit is not finite, it is the argmax, and its score is minus infinity.
    """
    largest = tl.max(tl.where(x == x, x, _INF))  # NaN must not get lost
    best = -float("inf")
    if (hot > 0) & (tl.abs(largest) < _INF):
        lower, upper = random_words(key, step)
        noise = negative_exponentials(lower, upper, first + column, NATIVE)
        races = noise * tl.exp2(
            (largest - x) * (_LOG2_E / hot)
        )  # no NaN: a logit is finite or -inf
        best = tl.max(races)
        at = tl.min(tl.where(races == best, column, _LAST))
    else:
        largest, at = first_best(x, column)
    return largest, best, at


@triton.jit
def chunk_kernel(
    best, races, ids, logits, rows, steps, floats, ints, row_stride, float_stride, int_stride,
    first,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, DRAW: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Sample a token from one chunk of a row, by the largest -E / weight with DRAW, else the argmax.

    E is exponential noise. One program per row and chunk of BLOCK columns.
    best, races, ids: outputs `[B, CHUNKS]`: the chunk's largest logit; the sampled token's -E / weight
        (only with DRAW) and column.
    logits: `[B, V]`, rows `row_stride` apart. rows: `[B]`, each request's row of settings. steps: `[B]`,
        the number of its output tokens before. floats, ints: settings of all rows, `[rows, 5]` and `[rows,
        3]`, rows `float_stride` and `int_stride` apart.
    first: the token id of the first column. NATIVE: use the GPU's fast logarithm.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=-float("inf")).to(
        tl.float32
    )
    place = row * CHUNKS + chunk
    if DRAW:
        settings = tl.load(rows + row)
        hot = tl.load(floats + settings * float_stride + _TEMPERATURE)
        key = tl.load(ints + settings * int_stride + _KEY)
        top, won, at = chunk_race(x, column, hot, key, tl.load(steps + row), first, NATIVE)
        tl.store(races + place, won)
    else:
        top, at = first_best(x, column)
    tl.store(best + place, top)
    tl.store(ids + place, at)


@triton.jit
def finish_kernel(
    tokens, best, races, ids, rows, floats, float_stride,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Store a row's token: of the tokens sampled from its chunks, the one with the largest -E / weight.

    One program per row. Weights are relative to the row's largest logit. In a greedy row, or where the
    row's largest logit is not finite, the token is the argmax, the first of equals.
    tokens: output `[B]` int64. best, races, ids: `[B, CHUNKS]` as `chunk_kernel` stored them: largest
        logit; the sampled token's -E / weight (E is exponential noise) and column. rows: `[B]`, each
        request's row of settings.
    floats: settings of all rows, `float_stride` apart. CHUNKS_PAD: CHUNKS or the next power of two. DRAW:
        False: every row is greedy.
    """
    row, i = tl.program_id(0), tl.arange(0, CHUNKS_PAD)
    x = tl.load(best + row * CHUNKS + i, mask=i < CHUNKS, other=-float("inf"))
    at = tl.load(ids + row * CHUNKS + i, mask=i < CHUNKS, other=_LAST)
    largest, token = first_best(x, at)
    if DRAW:
        hot = tl.load(floats + tl.load(rows + row) * float_stride + _TEMPERATURE)
        if (hot > 0) & (tl.abs(largest) < _INF):  # NaN fails, too
            race = tl.load(races + row * CHUNKS + i, mask=i < CHUNKS, other=-float("inf"))
            _, token = first_best(race * tl.exp2((largest - x) * (_LOG2_E / hot)), at)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def report_kernel(reported, tokens, logits, row_stride, token_stride, NAN_TOKEN: tl.constexpr):
    """Store a row's sampled token, or NAN_TOKEN if the logit of that token is NaN. One program per row.

    reported: output `[B]`. tokens: `[B]`, the sampled tokens. logits: `[B, V]`, with distances of
        `row_stride` between rows and `token_stride` between columns.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    x = tl.load(logits + row * row_stride + token * token_stride).to(tl.float32)
    tl.store(reported + row, tl.where(x == x, token, NAN_TOKEN))


class DrawSettings(NamedTuple):
    """Settings of a random draw of one token for each request of a batch.

    rows: `[B]` int64, each request's row of `floats` and `ints`. steps: `[B]` int64, the number of its
        output tokens before this one.
    floats, ints: settings of all rows, `[rows, 5]` float32 (such as the temperature) and `[rows, 3]` int64
        (such as the seed's key).
    """

    rows: Tensor
    steps: Tensor
    floats: Tensor
    ints: Tensor


class BestTokens(NamedTuple):
    """The tokens sampled from the chunks of each row of logits, `[B, CHUNKS]` each.

    best: float32, the chunk's largest logit. ids: int32, the sampled token's column.
    races: float32, the sampled token's -E / weight, where E is exponential noise; None where the argmax is
        taken.
    """

    best: Tensor
    races: Tensor | None
    ids: Tensor


def best_of_chunks(
    logits: Tensor, draw: DrawSettings | None = None, first: int = 0
) -> BestTokens:
    """Return the token sampled from each chunk (some thousand columns) of each row of `logits [B, V]`.

    draw: settings of the draw; None: the argmax. first: the token id of the first column.
    """
    batch, vocab = logits.shape
    # Few rows take more programs, to fill the multiprocessors. A word of a mask has 32 tokens (phase 12).
    block = min(CHUNK if batch > 4 else CHUNK // 4, max(32, triton.next_power_of_2(vocab)))
    shape = batch, triton.cdiv(vocab, block)
    logits = (
        logits if logits.stride(1) == 1 else logits.contiguous()
    )  # some products on CPUs leave gaps
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    best = torch.empty_like(ids, dtype=torch.float32)
    races = None if draw is None else torch.empty_like(best)
    rows, steps, floats, ints = draw or (ids,) * 4  # not read where nothing is drawn
    if batch:
        chunk_kernel[shape](
            best, races, ids, logits, rows, steps, floats, ints,
            logits.stride(0), floats.stride(0), ints.stride(0), first,
            V=vocab, BLOCK=block, CHUNKS=shape[1], DRAW=draw is not None,
            NATIVE=logits.is_cuda,
        )  # fmt: skip
    return BestTokens(best, races, ids)


def best_of_rows(found: BestTokens, draw: DrawSettings | None = None) -> Tensor:
    """Return the sampled token of each row, `[B]` int64, from the tokens sampled from its chunks.

    found: what `best_of_chunks` returned. draw: settings of the draw; None: the argmax.
    """
    batch, chunks = found.ids.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=found.ids.device)
    rows, _, floats, _ = draw or (found.ids,) * 4
    if batch:
        finish_kernel[(batch,)](
            tokens, *found, rows, floats, floats.stride(0),
            CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), DRAW=draw is not None,
            num_warps=1,
        )  # fmt: skip
    return tokens


def draw_rows(logits: Tensor, draw: DrawSettings | None = None) -> Tensor:
    """Return one token per row, `[B]` int64, drawn from all tokens with a logit above -inf.

    logits: `[B, V]`, after edits and penalties. draw: settings of the draw. Without them each row gets its
        argmax (of equals the first; NaN is the largest), and so does a row whose temperature is 0, or whose
        largest logit is not finite.
    """
    return best_of_rows(best_of_chunks(logits, draw), draw)


class TritonSamplerBackend(SamplerBackend):
    """Chooses tokens by Triton kernels, the same tokens as PyTorch's `SamplerBackend`.

    PyTorch still computes top-k, top-p and min-p.
    """

    def choose(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        masked: bool,
    ) -> Tensor:
        """Return the sampled tokens `[S]` int64 of `logits [S, V]`, which are edited and masked already.

        rows: `[S]` int64, each request's row of settings in `sampler`. steps: `[S]` int64, the number of
            its output tokens before. plan: operations that the rows need. masked: True if grammars restrict
            the samples.

        Without top-k, top-p and min-p the logits may have the model's own dtype.
        """
        if not plan.draws:
            return draw_rows(logits)
        if plan.features & TRUNCATION:
            return super().choose(sampler, logits, rows, steps, plan, masked)
        return draw_rows(logits, DrawSettings(rows, steps, sampler.floats, sampler.ints))

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `tokens [S]` with `NAN_TOKEN` in place of those whose logit is NaN; logits: `[S, V]`."""
        reported = torch.empty_like(tokens)
        if len(tokens):
            strides = logits.stride(0), logits.stride(1)
            report_kernel[(len(tokens),)](
                reported, tokens, logits, *strides, NAN_TOKEN=NAN_TOKEN, num_warps=1
            )
        return reported

    def draw(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        features: SamplingFlags,
    ) -> Tensor:
        """Return tokens `[S]` int64 drawn from `logits [S, V]`; greedy rows get the argmax.

        rows: `[S]` int64, each request's row of settings in `sampler`. steps: `[S]` int64, the number of
            its output tokens before. features: operations that some row needs, such as top-k.

        No noise `[S, V]` is stored; tokens that top-k, top-p or min-p exclude get logits of -inf.
        """
        if features & TRUNCATION:
            logits = logits.masked_fill(
                sampler.weigh(logits, rows, features) == 0, float("-inf")
            )
        return draw_rows(logits, DrawSettings(rows, steps, sampler.floats, sampler.ints))
