"""RoPE in two kernels: the angles of a step, and everything between the QKV projection and attention.

The second one normalizes the query and key heads, rotates them, and stores keys and values. As separate
operations, these are seven torch kernels that each read and write all heads. Fused, a program takes up to
`HEADS` heads of one token into registers, and writes queries to a tensor, keys and values to the KV cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from forward.attention import LayerSpec
from forward.rope import Rope
from paged_cache.pool import LayerBlocks
from triton_paged_attention.kernels.kv_store import encode, store_arguments

HEADS: tl.constexpr = tl.constexpr(8)
"""Heads of a token that one program takes."""


class HeadNorms(NamedTuple):
    """The weights of the RMSNorms of query and key heads, and epsilon.

    q_weight, k_weight: `[D]`, the factors by which the norms multiply.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class ProductScales(NamedTuple):
    """Scales of a projection whose output is not scaled yet: the kernel that reads the output multiplies it.

    rows: `[T]` float32, columns: `[N]` float32: output `[t, n]` is multiplied by `rows[t] * columns[n]`.
    dtype: of the scaled product; the unscaled output may be in another.
    """

    rows: Tensor
    columns: Tensor
    dtype: torch.dtype


@triton.jit
def norm_scale(squares, eps, D: tl.constexpr):
    """Return the factor of an RMSNorm, `1 / sqrt(squares / D + eps)`.

    squares: the sum of squares of a head's D numbers.
    """
    return tl.rsqrt(squares / D + eps)


@triton.jit
def apply_norm_weight(x, scale, weight):
    """Return `x * scale * weight` in the dtype of `x`, computed in float32."""
    return (x.to(tl.float32) * scale * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def rotate(x, y, cos, sin):
    """Return one half of a head after RoPE, `x cos + y sin`, in the dtype of `x`.

    A number of `x` and one of `y`, the head's other half, are a pair that is rotated. For the first number
    of pairs, the caller passes `sin` with a minus sign.
    """
    return (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def store_head(out, at, x, scale, mask, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """Write `x`, one half of each head of a token, to `out + at` where `mask`, in the cache's format.

    scale: by which `x` is divided first, or None. LIMIT: largest magnitude of the format. WHOLE: True for a
        format of integers.
    """
    if scale is not None:
        x = encode(x, scale, LIMIT, WHOLE)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_rope_kernel(
    q_out, qkv, cos, sin, q_weight, k_weight, slots, rows, columns, eps,
    k_cache, v_cache, k_scale, v_scale, block_stride, slot_stride,
    H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and store up to HEADS (8) heads of one token: query, key or value heads.

    One program per token and group of HEADS heads. Values are only stored.
    qkv: `[T, (H + 2 KH) D]`. q_out: output `[T, H, D]`. cos, sin: `[T, D]` float32, the first half of a
        sine negated. HALF: D / 2.
    k_cache, v_cache: the layer's blocks `[N, P, KH, D]`, written at `slots [T]` (`block * P + offset`;
        negative: not at all). block_stride, slot_stride: numbers from a block or token of these to the next.
    PLACE: device function that returns where values lie in a block. P: tokens of a block.
    q_weight, k_weight: `[D]`, factors of the heads' RMSNorms; None: no norm. eps: theirs.
    rows, columns: `[T]` and `[(H + 2 KH) D]`, by which `qkv` is multiplied first; None: it is not.
    k_scale, v_scale: `[KH]`, by which stored keys and values are divided; None: they are not.
    LIMIT, WHOLE: largest magnitude of the cache's format; True if it has integers.

    A thread has both numbers of a rotated pair, so each is read once.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KH + HEADS - 1) // HEADS
    row = qkv + token * (H + 2 * KH) * D
    slot = tl.load(slots + token)
    at_token = (slot // P) * block_stride + (slot % P) * slot_stride
    at_value, step = PLACE(slot, block_stride, slot_stride, P)

    is_query, is_value = part < Q_PARTS, part >= Q_PARTS + KV_PARTS
    head = (
        part - (0 if is_query else Q_PARTS) - (KV_PARTS if is_value else 0)
    ) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, triton.next_power_of_2(HALF))
    real = i < HALF
    mask = (head < (H if is_query else KH))[:, None] & real[None, :]
    stored = tl.where(slot >= 0, mask, False)
    at = head[:, None] * D + i[None, :]
    part_at = (0 if is_query else H * D) + (KH * D if is_value else 0)
    first = row + part_at
    x = tl.load(first + at, mask=mask, other=0.0)
    y = tl.load(first + at + HALF, mask=mask, other=0.0)
    if rows is not None:
        times = tl.load(rows + token)
        times_x = times * tl.load(columns + part_at + at, mask=mask, other=0.0)
        times_y = times * tl.load(columns + part_at + at + HALF, mask=mask, other=0.0)
        x = (x.to(tl.float32) * times_x).to(q_out.dtype.element_ty)
        y = (y.to(tl.float32) * times_y).to(q_out.dtype.element_ty)
    head_scale = None
    if k_scale is not None:
        head_scale = tl.full([HEADS, 1], 1.0, tl.float32)
        if not is_query:
            scales = v_scale if is_value else k_scale
            head_scale = tl.load(scales + head, mask=head < KH, other=1.0)[:, None]
    if is_value:  # only moved
        store_head(v_cache, at_value + at * step, x, head_scale, stored, LIMIT, WHOLE)
        store_head(v_cache, at_value + (at + HALF) * step, y, head_scale, stored, LIMIT, WHOLE)
    else:
        if q_weight is not None:
            weight = (q_weight if is_query else k_weight) + i[None, :]
            w_x = tl.load(weight, mask=real[None, :], other=0.0)
            w_y = tl.load(weight + HALF, mask=real[None, :], other=0.0)
            full_x, full_y = x.to(tl.float32), y.to(tl.float32)
            scale = norm_scale(tl.sum(full_x * full_x + full_y * full_y, axis=1), eps, D)[
                :, None
            ]
            x, y = apply_norm_weight(x, scale, w_x), apply_norm_weight(y, scale, w_y)
        c = tl.load(cos + token * D + i, mask=real, other=0.0)[None, :]
        s = tl.load(sin + token * D + HALF + i, mask=real, other=0.0)[None, :]
        turned_x, turned_y = rotate(x, y, c, -s), rotate(y, x, c, s)
        if is_query:
            tl.store(q_out + token * H * D + at, turned_x, mask=mask)
            tl.store(q_out + token * H * D + at + HALF, turned_y, mask=mask)
        else:
            store_head(k_cache, at_token + at, turned_x, head_scale, stored, LIMIT, WHOLE)
            store_head(
                k_cache, at_token + at + HALF, turned_y, head_scale, stored, LIMIT, WHOLE
            )


def norm_rope(
    spec: LayerSpec,
    qkv: Tensor,  # [T, (H + 2 KH) D]
    cos_sin: tuple[
        Tensor, Tensor
    ],  # T D numbers each, float32; the first half of a sine is negated
    cache: LayerBlocks,
    slots: Tensor,  # [T] int64
    norms: HeadNorms | None,
    pending: ProductScales | None = None,
) -> Tensor:
    """Return queries `[T, H, D]`, normalized and rotated; normalize, rotate and store keys, and store values.

    spec: the layer. qkv: `[T, (H + 2 KH) D]`, the projection's output. cos_sin: RoPE's cosines and sines,
        `T D` float32 numbers each, the first half of a sine negated.
    cache, slots: the layer's blocks, and each token's slot in them; a negative slot stores nothing.
    norms: of query and key heads; None: the model has none.
    pending: scales by which `qkv` is to be multiplied first; None: `qkv` is scaled already.
    """
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    half = spec.head_dim // 2
    dtype = qkv.dtype if pending is None else pending.dtype
    q = torch.empty(len(qkv), heads, spec.head_dim, dtype=dtype, device=qkv.device)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    parts = triton.cdiv(heads, HEADS.value) + 2 * triton.cdiv(kv_heads, HEADS.value)
    norm_rope_kernel[(len(qkv), parts)](
        q, qkv, *cos_sin, q_weight, k_weight, slots,
        *(pending or (None, None))[:2], eps,
        H=heads, KH=kv_heads, HALF=half, **store_arguments(cache), num_warps=4,
    )  # fmt: skip
    return q


@triton.jit
def angles_kernel(cos, sin, positions, frequencies, HALF: tl.constexpr):
    """Write the cosines and sines of one token's RoPE angles. One program per token.

    cos, sin: output `[T, 2 HALF]` float32; the second half repeats the first, which is negated in `sin`.
    positions: `[T]`. frequencies: `[HALF]`, in radians per position.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(HALF))
    real = i < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(
        frequencies + i, mask=real, other=0.0
    )
    c, s = tl.cos(angle), tl.sin(angle)
    at = token * 2 * HALF + i
    tl.store(cos + at, c, mask=real)
    tl.store(cos + at + HALF, c, mask=real)
    tl.store(sin + at, -s, mask=real)
    tl.store(sin + at + HALF, s, mask=real)


class FusedRope(nn.Module):
    """A layer that computes RoPE's cosines and sines in one kernel; in plain torch it takes seven."""

    inverse_frequencies: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", rope.inverse_frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of `positions [T]`, `[T, 1, D]` float32 each.

        The first half of a sine is negated, as `norm_rope` expects it.
        """
        half = len(self.inverse_frequencies)
        cos, sin = torch.empty(
            2, *positions.shape, 1, 2 * half, dtype=torch.float32, device=positions.device
        )
        angles_kernel[(positions.numel(),)](
            cos, sin, positions.contiguous(), self.inverse_frequencies,
            HALF=half, num_warps=1,
        )  # fmt: skip
        return cos, sin
