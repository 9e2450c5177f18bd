"""Sampling as an argmax: the Gumbel-max trick (Maddison et al. 2014, "A* sampling").

Add to every logit / temperature an independent Gumbel number, -log(-log(u)), and take the largest: the
winner is distributed as softmax(logits / temperature). No softmax, no sorting, no cumulative sum: one pass
over the logits. Rows that need top-k, top-p or min-p need more and stay with `common.sampling.sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gumbel_kernel(
    best, best_at, logits, temperature, seeds, steps, row_stride,
    V: tl.constexpr, QUARTER: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk of the vocabulary: its best column."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    hot = tl.load(temperature + row)
    key = tl.load(seeds + row) ^ (tl.load(steps + row) * 0x9E3779B97F)  # a stream per (seed, step)
    inverse = 1.0 / tl.where(hot > 0, hot, 1.0)
    i = tl.arange(0, QUARTER)
    # One call of the generator makes four numbers, so the chunk is four runs of QUARTER columns.
    u0, u1, u2, u3 = tl.rand4x(key, chunk * QUARTER + i)
    top, at = -float("inf"), 0
    for part in tl.static_range(4):
        u = u0 if part == 0 else (u1 if part == 1 else (u2 if part == 2 else u3))
        column = (chunk * 4 + part) * QUARTER + i
        x = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=column < V, other=-float("inf"))
        x = x.to(tl.float32) * inverse
        noise = -tl.log(-tl.log(tl.maximum(u, 1.0e-30)))
        x = tl.where(hot > 0, x + noise, x)
        value, where = tl.max(x, axis=0, return_indices=True)
        at = tl.where(value > top, (chunk * 4 + part) * QUARTER + where, at)
        top = tl.maximum(top, value)
    tl.store(best + row * CHUNKS + chunk, top)
    tl.store(best_at + row * CHUNKS + chunk, at)


@triton.jit
def best_kernel(tokens, best, best_at, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """One program per row: the best of its chunks' best."""
    row = tl.program_id(0)
    i = tl.arange(0, CHUNKS_PAD)
    value = tl.load(best + row * CHUNKS + i, mask=i < CHUNKS, other=-float("inf"))
    winner = tl.argmax(value, axis=0)
    tl.store(tokens + row, tl.load(best_at + row * CHUNKS + winner).to(tl.int64))


def gumbel_sample(
    logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B] float32; 0: greedy
    seeds: Tensor,  # [B] int64
    steps: Tensor,  # [B] int64, output tokens before this one
) -> Tensor:
    """One token per row, `[B]` int64. A token depends on its row's logits, seed and step alone."""
    batch, vocab = logits.shape
    quarter = min(1024, triton.next_power_of_2(triton.cdiv(vocab, 4)))
    chunks = triton.cdiv(vocab, 4 * quarter)
    best = torch.empty(batch, chunks, dtype=torch.float32, device=logits.device)
    best_at = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    gumbel_kernel[(batch, chunks)](
        best, best_at, logits, temperature, seeds, steps, logits.stride(0),
        V=vocab, QUARTER=quarter, CHUNKS=chunks, num_warps=4,
    )  # fmt: skip
    best_kernel[(batch,)](
        tokens, best, best_at, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), num_warps=1
    )
    return tokens
