"""Descriptors for Hopper's tensor memory accelerator (TMA).

One thread asks the TMA for a whole tile; the addresses of its rows are worked out in hardware instead of in
registers by every thread. It copies a box out of a dense array, so the tile must lie inside one block.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def describe(cache: Tensor, block_n: int) -> TensorDescriptor:
    """A layer's cache `[N, P, KH, D]`, as `[N, P, KH * D]` in tiles of `block_n` tokens of a block and head.

    With the block as an axis of its own, a tile that begins before its block reads zeros, not the block that
    lies before it in memory.
    """
    blocks, block_size, kv_heads, d = cache.shape
    row = kv_heads * d
    return TensorDescriptor(cache, [blocks, block_size, row], [block_size * row, row, 1], [1, block_n, d])
