"""The layout of the paged pool for kernels, and the kernel that stores new keys and values.

A slot is `block * P + offset`. On Hopper tiles are copied by the tensor memory accelerator (TMA): one
thread asks for a whole tile, and the addresses of its rows are worked out in hardware instead of in
registers by every thread. It copies a box out of a dense array, so the tile must lie inside one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks, largest
from triton_paged_attention.tiles import attend


@triton.jit
def value_place(slot, block_stride, slot_stride, P: tl.constexpr):
    """Return the offset of a token's first value in the cache, and the distance between its values."""
    return (slot // P) * block_stride + (slot % P) * slot_stride, 1


class ValueLayout(NamedTuple):
    """The layout of values in a block, a seam: device functions, and what a launch does for them.

    attend, place: have the signatures of `tiles.attend` and `value_place`.
    fit: returns a configuration (of `tables`) in which they can run, from one and the block size.
    words: returns values in the type that `attend` loads.
    """

    attend: Any = attend
    place: Any = value_place
    fit: Callable[[Any, int], Any] = lambda config, block_size: config
    words: Callable[[Tensor], Tensor] = lambda values: values


PLAIN = ValueLayout()
"""Used where the cache names no other layout."""


def attention_arguments(
    layer: LayerSpec, cache: LayerBlocks, block_tables: Tensor
) -> dict[str, Any]:
    """Return the arguments that all attention kernels share, by name; see `decode.paged_decode`."""
    block_stride, slot_stride, head_stride, _ = cache.k.stride()
    return {
        "scale": layer.scale,
        "table_stride": block_tables.stride(0),
        "block_stride": block_stride,
        "slot_stride": slot_stride,
        "head_stride": head_stride,
        "H": layer.num_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "D": layer.head_dim,
        "D_PAD": max(16, triton.next_power_of_2(layer.head_dim)),
        "P": cache.k.shape[1],
        "WINDOW": layer.sliding_window or 0,
    }


def store_arguments(cache: LayerBlocks) -> dict[str, Any]:
    """Return the arguments that kernels which store keys and values share, by name."""
    k_scale, v_scale = cache[2:4] if cache.scaled else cache[:2]
    return {
        "k_cache": cache.k,
        "v_cache": cache.v,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "block_stride": cache.k.stride(0),
        "slot_stride": cache.k.stride(1),
        "P": cache.k.shape[1],
        "SCALED": cache.scaled,
        "LIMIT": largest(cache.k.dtype) if cache.scaled else 0.0,
        "WHOLE": not cache.k.dtype.is_floating_point,
        "PLACE": (cache.layout or PLAIN).place,
    }


def describe(cache: Tensor, block_n: int) -> TensorDescriptor:
    """Describe a layer's cache to the TMA: `[N, P, KH * D]` in tiles of `block_n` tokens of a block and head.

    With the block as an axis of its own, a tile that begins before its block reads zeros, not the block that
    lies before it in memory.
    """
    blocks, block_size, kv_heads, d = cache.shape
    row = kv_heads * d
    return TensorDescriptor(
        cache, [blocks, block_size, row], [block_size * row, row, 1], [1, block_n, d]
    )


@triton.jit
def encode(x, scale, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile divided by its scales and rounded to the cache's format, but not converted to its dtype.

    LIMIT: largest magnitude of the format. WHOLE: it has integers.
    """
    x = tl.div_rn(x.to(tl.float32), scale)  # as torch divides
    if WHOLE:
        x = tl.floor(x + 0.5)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def kv_store_kernel(
    k, v, slots, k_stride, v_stride,
    k_cache, v_cache, k_scale, v_scale, block_stride, slot_stride,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr, WHOLE: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Store part of one token's key and value heads in its slot. One program per token and part
    of its heads.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    i = part * BLOCK + tl.arange(0, BLOCK)
    mask = tl.where(
        slot >= 0, i < SIZE, False
    )  # not `&`: the interpreter of Triton 3.9 refuses it
    at = (slot // P) * block_stride + (slot % P) * slot_stride + i
    key = tl.load(k + token * k_stride + i, mask=mask)
    value = tl.load(v + token * v_stride + i, mask=mask)
    if SCALED:
        key = encode(key, tl.load(k_scale + i // D, mask=mask, other=1.0), LIMIT, WHOLE)
        value = encode(value, tl.load(v_scale + i // D, mask=mask, other=1.0), LIMIT, WHOLE)
    tl.store(k_cache + at, key.to(k_cache.dtype.element_ty), mask=mask)
    first, step = PLACE(slot, block_stride, slot_stride, P)
    tl.store(v_cache + first + i * step, value.to(v_cache.dtype.element_ty), mask=mask)


def kv_store(
    k: Tensor,  # [T, KH, D], heads of a token contiguous
    v: Tensor,
    cache: LayerBlocks,
    slots: Tensor,  # [T] int64; negative: this token is padding and is not stored
) -> None:
    """Write every token's key and value heads, `[T, KH, D]`, to its slot of the layer's cache, in the cache's
    format.

    slots: `[T]` int64; tokens with slot -1 are not stored.
    """
    tokens, kv_heads, d = k.shape
    k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (k, v))
    size = kv_heads * d
    block = min(1024, triton.next_power_of_2(size))
    kv_store_kernel[(tokens, triton.cdiv(size, block))](
        k, v, slots, k.stride(0), v.stride(0), SIZE=size, D=d, BLOCK=block,
        **store_arguments(cache), num_warps=max(1, block // 256),
    )  # fmt: skip
