"""Scatter new keys and values into the paged pool by slot: slot = block * P + offset."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_cache.pool import LayerCache


@triton.jit
def kv_store_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, block_stride, slot_stride,
    SIZE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and part of its heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    i = part * BLOCK + tl.arange(0, BLOCK)
    mask = (i < SIZE) & (slot >= 0)
    at = (slot // P) * block_stride + (slot % P) * slot_stride + i
    tl.store(k_cache + at, tl.load(k + token * k_stride + i, mask=mask), mask=mask)
    tl.store(v_cache + at, tl.load(v + token * v_stride + i, mask=mask), mask=mask)


def kv_store(
    k: Tensor,  # [T, KH, D], heads of a token contiguous
    v: Tensor,
    cache: LayerCache,
    slots: Tensor,  # [T] int64; negative: this token is padding and is not stored
) -> None:
    """Write every token's key and value heads to its slot of the layer's cache."""
    tokens, kv_heads, d = k.shape
    k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (k, v))
    size = kv_heads * d
    block = min(1024, triton.next_power_of_2(size))
    if tokens:
        kv_store_kernel[(tokens, triton.cdiv(size, block))](
            k, v, cache.k, cache.v, slots, k.stride(0), v.stride(0), *cache.k.stride()[:2],
            SIZE=size, P=cache.k.shape[1], BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
