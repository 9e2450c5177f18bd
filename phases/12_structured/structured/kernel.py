"""Masks applied by one kernel, which reads a bit a token and writes nothing but minus infinities."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.sampling.sampler import Allowed, Sampler

BLOCK = 4096


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


class MaskingSampler(Sampler):
    """Put before another sampler's class: masks by the kernel."""

    def forbid(self, logits: Tensor, allowed: Allowed) -> None:
        """See `Sampler.forbid`."""
        forbid(logits, allowed)


def with_kernel(sampler: type[Sampler]) -> type[Sampler]:
    """A sampler's class with masks by the kernel."""
    return type(f"Masking{sampler.__name__}", (MaskingSampler, sampler), {})
