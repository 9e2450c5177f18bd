"""The layout of the paged KV cache for kernels, and the kernel that stores new keys and values.

A slot, `block * P + offset`, is where a token's key and value are. On Hopper tiles are copied by the tensor
memory accelerator (TMA): one thread asks for a whole tile, and the addresses of its rows are computed in
hardware instead of in registers by every thread. The accelerator copies a box out of a dense array, so the
tile must lie inside one block.
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
from triton_paged_attention.tiles import attend, padded


@triton.jit
def value_place(slot, block_stride, slot_stride, P: tl.constexpr):
    """Return where a token's values begin in the value cache, and the distance between two of them (1).

    Both are in numbers, not bytes. slot: the token's slot, `block * P + offset`. P: tokens of a block.
    block_stride, slot_stride: numbers from one block or token to the next.
    """
    return (slot // P) * block_stride + (slot % P) * slot_stride, 1


class ValueLayout(NamedTuple):
    """An order of values in a KV cache block: the device functions that read and write values in this order.

    The default is the plain order `[P, KH, D]`.
    attend: device function with the signature of `tiles.attend`, which reads keys and values.
    place: device function with the signature of `value_place`, which says where a token's values are.
    fit: returns block sizes with which `attend` can run, given block sizes and the tokens of a block.
    words: returns a view of the value cache in the dtype that `attend` loads.
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
    """Return the arguments that all attention kernels share, by name: score scale, strides, sizes.

    layer: the layer's heads, scale and window. cache: its blocks. block_tables: `[B, max_blocks]`.
    """
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
        "D_PAD": padded(layer.head_dim),
        "P": cache.k.shape[1],
        "WINDOW": layer.sliding_window or 0,
    }


def store_arguments(cache: LayerBlocks) -> dict[str, Any]:
    """Return the arguments shared by all kernels that store keys and values, by name.

    They are tensors, strides and the storage format of the layer's blocks, `cache`.
    """

    return {
        "k_cache": cache.k,
        "v_cache": cache.v,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "block_stride": cache.k.stride(0),
        "slot_stride": cache.k.stride(1),
        "P": cache.k.shape[1],
        "LIMIT": largest(cache.k.dtype) if cache.scaled else 0.0,
        "WHOLE": not cache.k.dtype.is_floating_point,
        "PLACE": (cache.layout or PLAIN).place,
    }


def describe(cache: Tensor, block_n: int) -> TensorDescriptor:
    """Return a TMA descriptor by which kernels load tiles of a layer's keys or values.

    cache: `[N, P, KH, D]`, described as `[N, P, KH * D]`; a tile is `block_n` tokens of one block and head.
    The block is an axis of its own: a tile that begins before its block reads zeros, not the block that
    lies before it in memory.
    """
    blocks, block_size, kv_heads, d = cache.shape
    row = kv_heads * d
    return TensorDescriptor(
        cache, [blocks, block_size, row], [block_size * row, row, 1], [1, block_n, d]
    )


@triton.jit
def encode(x, scale, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile `x` by `scale`, clamped to LIMIT and rounded if WHOLE, as float32.

    scale: broadcasts to `x`. LIMIT: largest magnitude of the format. WHOLE: True for a format of integers.
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
    LIMIT: tl.constexpr, WHOLE: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Store BLOCK numbers of a token's key heads, and as many of its value heads, in the token's slot.

    One program per token and part of BLOCK numbers.
    k, v: `[T, KH, D]`, KH D = SIZE; k_stride, v_stride: numbers from a token to the next.
    k_cache, v_cache: the layer's blocks `[N, P, KH, D]`. block_stride, slot_stride: numbers from a block or
        token of these to the next.
    slots: `[T]` int64, `block * P + offset` of each token; negative: the token is not stored.
    k_scale, v_scale: `[KH]`, by which a head's numbers are divided for storage, in a format up to LIMIT
        (integers if WHOLE); None: they are stored as they are. PLACE: device function that returns where
        values lie, such as `value_place`.
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
    if k_scale is not None:
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
    """Write each token's keys and values to its slot of a layer's cache, in the cache's format.

    k, v: `[T, KH, D]`. cache: the layer's blocks. slots: `[T]` int64; tokens with slot -1 are not stored.
    """
    tokens, kv_heads, d = k.shape
    k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (k, v))
    size = kv_heads * d
    block = min(1024, triton.next_power_of_2(size))
    kv_store_kernel[(tokens, triton.cdiv(size, block))](
        k, v, slots, k.stride(0), v.stride(0), SIZE=size, D=d, BLOCK=block,
        **store_arguments(cache), num_warps=max(1, block // 256),
    )  # fmt: skip
