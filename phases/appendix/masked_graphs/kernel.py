"""A Triton kernel that applies grammar masks to logits and skips the padding of CUDA graphs."""

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
    positions,
    row_stride,
    token_stride,
    word_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the logits of forbidden tokens to minus infinity. One program per mask and BLOCK tokens.

    logits: rows and columns `row_stride` and `token_stride` numbers apart, V columns.
    words: `[M, ceil(V / 32)]` int32, rows `word_stride` apart; a bit is 1 if its token is allowed.
    positions: `[M]`, the row of logits of each mask; -1: padding.
    """
    mask, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(positions + mask)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    real = tl.where(row >= 0, token < V, False)
    word = tl.load(words + mask * word_stride + token // 32, mask=real, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    tl.store(
        logits + row * row_stride + token * token_stride, -float("inf"), mask=barred & real
    )


class Forbids(SamplerBackend):
    """A sampler backend that applies grammar masks by a Triton kernel and samples by PyTorch."""

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: TokenBitmask) -> None:
        """Set the logits `[B, V]` of forbidden tokens to minus infinity, in place, by a Triton kernel.

        allowed: bit masks of some rows of the logits. sampler: not used.
        """
        count, vocab = len(allowed.positions), logits.shape[1]
        block = min(BLOCK, max(32, triton.next_power_of_2(vocab)))
        if count:
            forbid_kernel[(count, triton.cdiv(vocab, block))](
                logits, allowed.words, allowed.positions,
                logits.stride(0), logits.stride(1), allowed.words.stride(0),
                V=vocab, BLOCK=block,
            )  # fmt: skip


class ForbidsTriton(Forbids, TritonSamplerBackend):
    """A sampler backend that applies grammar masks and samples by Triton kernels."""


def with_kernel(sampler_backend: SamplerBackend) -> SamplerBackend:
    """Return a sampler backend that samples as `sampler_backend` does, and applies masks by a kernel."""
    return ForbidsTriton() if isinstance(sampler_backend, TritonSamplerBackend) else Forbids()
