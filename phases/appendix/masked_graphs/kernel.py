"""Masks applied by kernels: where nothing else changes the logits by the one that chooses, as it reads them.

Elsewhere by one that writes minus infinities. With that one before it, the choice for 256 rows of 151,936
tokens took an H200 0.22 ms, and its median step 0.1 more than now.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.sampling.rows import KEY, TEMPERATURE, Needs
from common.sampling.sampler import Allowed, Chooser, Masks, Plan, Sampler
from cuda_graphs import sampling
from cuda_graphs.sampling import TritonChooser, chunk_race, first_best

BLOCK = 4096
MASKS = tl.constexpr(256)
"""How many masks are looked through at once for a row's."""
_TEMPERATURE, _KEY = tl.constexpr(TEMPERATURE), tl.constexpr(KEY)


@triton.jit
def forbid_kernel(
    logits, words, places, row_stride, token_stride, word_stride, V: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per mask and chunk of the vocabulary; place -1 is padding of a graph."""
    mask, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(places + mask)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    real = (token < V) & (row >= 0)
    word = tl.load(words + mask * word_stride + token // 32, mask=real, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * row_stride + token * token_stride, -float("inf"), mask=barred & real)


@triton.jit
def allowed_chunk(
    logits, words, places, M, row_stride, word_stride, row, chunk,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk of a row's logits, minus infinity where its mask has no bit, and columns: `[BLOCK / 32, 32]`.

    A word is read once for its 32 tokens, and where it has no bit their logits are not read at all. A row
    without a mask has all.
    """
    mask = tl.full((), -1, tl.int32)
    for first in range(0, M, MASKS):
        i = first + tl.arange(0, MASKS)
        own = tl.load(places + i, mask=i < M, other=-1) == row
        mask = tl.maximum(mask, tl.max(tl.where(own, i, -1)))
    mask = mask.to(tl.int64)
    at = chunk * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    word = tl.load(words + mask * word_stride + at, mask=(mask >= 0) & (at * 32 < V), other=-1)
    bit = tl.arange(0, 32)[None, :]
    column = at[:, None] * 32 + bit
    wanted = (word != 0)[:, None] & (column < V)
    x = tl.load(logits + row * row_stride + column, mask=wanted, other=-float("inf")).to(tl.float32)
    return tl.where((word[:, None] >> bit) & 1 != 0, x, -float("inf")), column


@triton.jit(do_not_specialize=["M"])
def masked_best_kernel(
    best, ids, logits, words, places, M, row_stride, word_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`best_kernel` of phase 06, under masks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, column = allowed_chunk(logits, words, places, M, row_stride, word_stride, row, chunk, V, BLOCK)
    largest, at = first_best(x, column)
    tl.store(best + row * CHUNKS + chunk, largest)
    tl.store(ids + row * CHUNKS + chunk, at)


@triton.jit(do_not_specialize=["M"])
def masked_race_kernel(
    best, races, ids, logits, words, places, M, rows, steps, floats, ints,
    row_stride, word_stride, float_stride, int_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`race_kernel` of phase 06, under masks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, column = allowed_chunk(logits, words, places, M, row_stride, word_stride, row, chunk, V, BLOCK)
    settings = tl.load(rows + row)
    hot = tl.load(floats + settings * float_stride + _TEMPERATURE)
    key = tl.load(ints + settings * int_stride + _KEY)
    largest, won, at = chunk_race(x, column, hot, key, tl.load(steps + row), 0, NATIVE)
    place = row * CHUNKS + chunk
    tl.store(best + place, largest)
    tl.store(races + place, won)
    tl.store(ids + place, at)


def forbid(logits: Tensor, allowed: Allowed) -> None:
    """`common.sampling.ops.forbid` in place: `logits [B, V]` of any dtype."""
    count, vocab = len(allowed.places), logits.shape[1]
    block = min(BLOCK, max(32, triton.next_power_of_2(vocab)))
    if count:
        forbid_kernel[(count, triton.cdiv(vocab, block))](
            logits, allowed.words, allowed.places,
            logits.stride(0), logits.stride(1), allowed.words.stride(0),
            V=vocab, BLOCK=block,
        )  # fmt: skip


class ForbiddingChooser(Chooser):
    """Applies masks by the kernel, and chooses by torch."""

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: Allowed) -> None:
        """See `Chooser.forbid`."""
        forbid(logits, allowed)


class ReadingChooser(TritonChooser):
    """Masks logits as they are read, wherever that is all that happens to them."""

    def reads(self, plan: Plan) -> bool:
        """See `Chooser.reads`."""
        return not plan.features & ~Needs.RANDOM

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: Allowed) -> None:
        """See `Chooser.forbid`."""
        forbid(logits, allowed)

    def choose(
        self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan, allowed: Masks
    ) -> Tensor:
        """See `Chooser.choose`."""
        if not isinstance(allowed, Allowed) or not len(allowed.places) or not self.reads(plan):
            return super().choose(sampler, logits, rows, steps, plan, allowed)
        if not plan.draws:
            return sampling.winner(best_of_allowed(logits, allowed))
        found = race_of_allowed(logits, allowed, rows, steps, sampler.floats, sampler.ints)
        return sampling.drawn(found, rows, sampler.floats)


def best_of_allowed(logits: Tensor, allowed: Allowed) -> sampling.Winners:
    """`best_of_chunks` of phase 06, under masks."""
    logits, found, cut = sampling.by_chunks(logits, races=False)
    masked_best_kernel[found.ids.shape](
        found.best, found.ids, logits, *allowed, len(allowed.places),
        logits.stride(0), allowed.words.stride(0), **cut,
    )  # fmt: skip
    return found


def race_of_allowed(
    logits: Tensor, allowed: Allowed, rows: Tensor, steps: Tensor, floats: Tensor, ints: Tensor
) -> sampling.Winners:
    """`race_of_chunks` of phase 06, under masks."""
    logits, found, cut = sampling.by_chunks(logits, races=True)
    masked_race_kernel[found.ids.shape](
        *found, logits, *allowed, len(allowed.places), rows, steps, floats, ints,
        logits.stride(0), allowed.words.stride(0), floats.stride(0), ints.stride(0),
        NATIVE=logits.is_cuda, **cut,
    )  # fmt: skip
    return found


def rehearse(sampler: Sampler) -> None:
    """Compile what steps outside of graphs sample by, so that nobody's first mask waits for it."""
    vocab, device = sampler.vocab_size, sampler.floats.device
    words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
    for batch in (1, 8):  # few rows are cut otherwise
        logits = torch.zeros(batch, vocab, device=device)
        rows = torch.zeros(batch, dtype=torch.int64, device=device)
        allowed = Allowed(words, rows[:1])
        best_of_allowed(logits, allowed)
        race_of_allowed(logits, allowed, rows, rows, sampler.floats, sampler.ints)
        forbid(logits, allowed)


def with_kernel(chooser: Chooser) -> Chooser:
    """Return a chooser of the same tokens with masks by kernels."""
    return ReadingChooser() if isinstance(chooser, TritonChooser) else ForbiddingChooser()
