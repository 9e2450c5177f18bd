"""Masks applied by a kernel, which knows the padding of graphs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.sampling.sampler import Sampler, SamplerBackend, TokenBitmask
from cuda_graphs.sampling import TritonSamplerBackend

BLOCK = 4096


@triton.jit
def forbid_kernel(
    logits,
    words,
    places,
    row_stride,
    token_stride,
    word_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per mask and chunk of the vocabulary; place -1 is padding of a graph."""
    mask, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(places + mask)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    real = tl.where(row >= 0, token < V, False)
    word = tl.load(words + mask * word_stride + token // 32, mask=real, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    tl.store(
        logits + row * row_stride + token * token_stride, -float("inf"), mask=barred & real
    )


def forbid(logits: Tensor, allowed: TokenBitmask) -> None:
    """`common.sampling.ops.forbid` in place: `logits [B, V]` of any dtype."""
    count, vocab = len(allowed.places), logits.shape[1]
    block = min(BLOCK, max(32, triton.next_power_of_2(vocab)))
    if count:
        forbid_kernel[(count, triton.cdiv(vocab, block))](
            logits, allowed.words, allowed.places,
            logits.stride(0), logits.stride(1), allowed.words.stride(0),
            V=vocab, BLOCK=block,
        )  # fmt: skip


class Forbids(SamplerBackend):
    """Applies masks by the kernel, and chooses by torch."""

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: TokenBitmask) -> None:
        """See `SamplerBackend.forbid`."""
        forbid(logits, allowed)


class ForbidsTriton(Forbids, TritonSamplerBackend):
    """Chooses by kernels, too."""


def with_kernel(sampler_backend: SamplerBackend) -> SamplerBackend:
    """Return a chooser of the same tokens with masks by the kernel."""
    return ForbidsTriton() if isinstance(sampler_backend, TritonSamplerBackend) else Forbids()
