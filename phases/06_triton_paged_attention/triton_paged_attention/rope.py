"""RoPE: the angles of a step, and the way from one fused QKV projection to attention, each in one kernel.

That way is the norm of the query and key heads, RoPE and the KV store. Apart, these are seven torch kernels
that each read and write all heads. Fused, a program takes a few heads of one token into registers, normalizes
and rotates them, and writes queries to a tensor, keys and values to the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from forward.rope import Rope

HEADS_PER_PROGRAM = 8


@triton.jit
def norm_heads(x, y, w_x, w_y, eps, D: tl.constexpr, ONE_PLUS: tl.constexpr):
    """The norm of heads `x [M, D]`, and of `y`, their partners half a head away; rounded as a norm apart."""
    w_x, w_y = w_x.to(tl.float32), w_y.to(tl.float32)
    if ONE_PLUS:
        w_x += 1.0
        w_y += 1.0
    full = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, axis=1) / D + eps)[:, None]
    return (full * scale * w_x).to(x.dtype), (y.to(tl.float32) * scale * w_y).to(x.dtype)


@triton.jit
def turn(x, y, cos, sin):
    """RoPE of heads `x` with their partners `y`; the first half of `sin` carries the minus sign."""
    return (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def norm_rope_kernel(
    q_out, k_out, v_out, qkv, cos, sin, q_weight, k_weight, slots, eps,
    block_stride, slot_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, P: tl.constexpr,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, STORE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program per token and few heads: first the queries, then the keys, then the values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KH + HEADS - 1) // HEADS
    local = tl.arange(0, HEADS)
    d = tl.arange(0, D_PAD)
    row = qkv + token * (H + 2 * KH) * D
    if STORE:
        slot = tl.load(slots + token)
        at_token = (slot // P) * block_stride + (slot % P) * slot_stride
        stored = slot >= 0
    else:
        at_token = token * KH * D
        stored = token >= 0

    if part >= Q_PARTS + KV_PARTS:  # values: only moved
        head = (part - Q_PARTS - KV_PARTS) * HEADS + local
        at = head[:, None] * D + d[None, :]
        mask = (head < KH)[:, None] & (d < D)[None, :]
        value = tl.load(row + (H + KH) * D + at, mask=mask)
        tl.store(v_out + at_token + at, value, mask=mask & stored)
    else:
        is_query = part < Q_PARTS
        head = (part if is_query else part - Q_PARTS) * HEADS + local
        mask = (head < (H if is_query else KH))[:, None] & (d < D)[None, :]
        at = head[:, None] * D + d[None, :]
        first = row + (0 if is_query else H * D)
        partner = (d + D // 2) % D  # the other number of each rotated pair, half a head away
        x = tl.load(first + at, mask=mask, other=0.0)
        y = tl.load(first + head[:, None] * D + partner[None, :], mask=mask, other=0.0)
        if NORM:
            weight = q_weight if is_query else k_weight
            w_x = tl.load(weight + d, mask=d < D, other=0.0)[None, :]
            w_y = tl.load(weight + partner, mask=d < D, other=0.0)[None, :]
            x, y = norm_heads(x, y, w_x, w_y, eps, D, ONE_PLUS)
        c = tl.load(cos + token * D + d, mask=d < D, other=0.0)[None, :]
        s = tl.load(sin + token * D + d, mask=d < D, other=0.0)[None, :]
        turned = turn(x, y, c, s)
        if is_query:
            tl.store(q_out + token * H * D + at, turned, mask=mask)
        else:
            tl.store(k_out + at_token + at, turned, mask=mask & stored)


def norm_rope(
    qkv: Tensor,  # [T, (H + 2 KH) D]
    cos: Tensor,  # [T, D] float32
    sin: Tensor,  # [T, D] float32, its first half negated
    *,
    heads: int,
    kv_heads: int,
    norm: tuple[Tensor, Tensor, float] | None = None,
    one_plus: bool = False,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[T, H, D]`, keys and values `[T, KH, D]`, the first two normalized and rotated.

    Args:
        norm: weights `[D]` of the query and the key norm, and epsilon; `None`: no norm.
        one_plus: the norms' weights are stored as distance from 1.
        cache: the layer's `k_cache`, `v_cache` `[N, P, KH, D]` and `slots [T]`. Then keys and values go
            there, and the tensors returned for them are the caches.
    """
    tokens = qkv.shape[0]
    d = qkv.shape[1] // (heads + 2 * kv_heads)
    q = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=qkv.device)
    if cache is None:
        k, v = (torch.empty(tokens, kv_heads, d, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
        slots, block_size, strides = q, 1, (0, 0)
    else:
        k, v, slots = cache
        block_size, strides = k.shape[1], (k.stride(0), k.stride(1))
    q_weight, k_weight, eps = norm if norm is not None else (q, q, 0.0)
    parts = triton.cdiv(heads, HEADS_PER_PROGRAM) + 2 * triton.cdiv(kv_heads, HEADS_PER_PROGRAM)
    if tokens:
        norm_rope_kernel[(tokens, parts)](
            q, k, v, qkv, cos, sin, q_weight, k_weight, slots, eps, *strides,
            H=heads, KH=kv_heads, D=d, D_PAD=triton.next_power_of_2(d), P=block_size,
            NORM=norm is not None, ONE_PLUS=one_plus, STORE=cache is not None, HEADS=HEADS_PER_PROGRAM,
            num_warps=4,
        )  # fmt: skip
    return q, k, v


@triton.jit
def angles_kernel(cos, sin, positions, frequencies, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_PAD)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + i, mask=i < HALF, other=0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    at = token * 2 * HALF + i
    tl.store(cos + at, c, mask=i < HALF)
    tl.store(cos + at + HALF, c, mask=i < HALF)
    tl.store(sin + at, -s, mask=i < HALF)
    tl.store(sin + at + HALF, s, mask=i < HALF)


class FusedRope(nn.Module):
    """`forward.rope.Rope` in one kernel instead of eight."""

    inverse_frequencies: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", rope.inverse_frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `Rope.forward`."""
        half = len(self.inverse_frequencies)
        shape = (*positions.shape, 1, 2 * half)
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
        if positions.numel():
            angles_kernel[(positions.numel(),)](
                cos, sin, positions.contiguous(), self.inverse_frequencies,
                HALF=half, HALF_PAD=triton.next_power_of_2(half), num_warps=1,
            )  # fmt: skip
        return cos, sin
