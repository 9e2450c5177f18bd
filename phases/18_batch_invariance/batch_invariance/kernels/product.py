"""A matrix product that never cuts the sum over K: one program adds all of it, from the first to the last.

How large a tile is does not change the bits of a row (on the GPUs that were measured; each tile is compared
with the first when weights are loaded). What would change them is a second program for the same tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from batch_invariance.probing import Product, random_rows, same_bits
from triton_paged_attention.hardware import multiprocessors


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out, x, weight, bias, rows, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `out = x W^T + bias`, `[rows, N]`. Neighbouring programs share a tile of weights.

    x: `[rows, K]`. weight: `[N, K]`. bias: `[N]`, read if BIAS. BLOCK_M, BLOCK_N, BLOCK_K: of the tile.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    i = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    j = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = k[None, :] + at < K
        a = tl.load(
            x + i[:, None] * K + at + k[None, :], mask=(i[:, None] < rows) & inside, other=0.0
        )
        b = tl.load(
            weight + j[:, None] * K + at + k[None, :],
            mask=(j[:, None] < N) & inside,
            other=0.0,
        )
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    keep = (i[:, None] < rows) & (j[None, :] < N)
    tl.store(out + i[:, None] * N + j[None, :], acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows", "programs"])
def descriptor_kernel(
    out, x, weight, bias, rows, N, K, programs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr = 8,
):  # fmt: skip
    """Compute `out = x W^T + bias`, `[rows, N]`: each program several tiles, copied by hardware (TMA).

    out, x, weight: descriptors of `[rows, N]`, `[rows, K]` and `[N, K]`. bias: `[N]`, read if BIAS.
    programs: number of programs. GROUP: number of row tiles that neighbouring programs compute with the same
        weights, so that both operands stay in the GPU's cache.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs):
        first = tile // (GROUP * tiles_n) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        i = (first + tile % (GROUP * tiles_n) % height) * BLOCK_M
        j = tile % (GROUP * tiles_n) // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(0, K, BLOCK_K):
            acc = tl.dot(x.load([i, at]), weight.load([j, at]).T, acc)
        if BIAS:
            column = j + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        out.store([i, j], acc.to(out.dtype))


class ProductTile(NamedTuple):
    """Block sizes and launch options of a product's kernel.

    descriptors: True: `descriptor_kernel` (copies by TMA) computes the product; False: `product_kernel`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


TILES = (
    ProductTile(16, 32, 128, 4, 6),
    ProductTile(64, 32, 128, 4, 5),
    ProductTile(64, 64, 128, 4, 4, True),
    ProductTile(128, 64, 64, 4, 6, True),
    ProductTile(128, 128, 64, 8, 4, True),
    ProductTile(128, 256, 64, 8, 3, True),
)
"""The first is the one that the others are compared with; it needs 60 KiB of shared memory."""
FLOAT32_TILES = (ProductTile(32, 32, 32, 4, 2),)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: ProductTile
) -> None:
    """Write `x W^T + bias` of `x [T, K]`, `weight [N, K]` and `bias [N]` (None: 0) to `out [T, N]`.

    tile: block sizes of the Triton kernel. If `tile.descriptors`, rows must have a multiple of 16 bytes.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    grid = triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, tile.block_n)
    options = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "BIAS": bias is not None, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    bias = x if bias is None else bias
    if not tile.descriptors:
        product_kernel[(grid,)](out, x, weight, bias, rows, outputs, inputs, **options)
        return
    programs = min(grid, multiprocessors(x.device))
    described = (
        TensorDescriptor(part, list(part.shape), [part.shape[1], 1], [height, width])
        for part, height, width in (
            (out, tile.block_m, tile.block_n),
            (x, tile.block_m, tile.block_k),
            (weight, tile.block_n, tile.block_k),
        )
    )
    descriptor_kernel[(programs,)](
        *described, bias, rows, outputs, inputs, programs, **options
    )


def tiled_products(
    weight: Tensor, tiles: Sequence[ProductTile] | None = None
) -> list[Product]:
    """Return product functions for weights of one shape: of the first tile, and of those with equal bits.

    A product function takes (x, weight, bias, out), and writes `x W^T + bias` to `out`.
    weight: any weight of this shape, `[N, K]`. tiles: block sizes to try; None: those of this module.
    """
    first, *others = tiles or (FLOAT32_TILES if weight.dtype == torch.float32 else TILES)
    x = random_rows(weight, 256)
    expected = weight.new_empty(len(x), len(weight))
    product(x, weight, None, expected, first)
    agreeing = [tile for tile in others if agrees(tile, x, weight, expected)]
    return [partial(product, tile=tile) for tile in (first, *agreeing)]


def agrees(tile: ProductTile, x: Tensor, weight: Tensor, expected: Tensor) -> bool:
    """Return True if a tile runs on this device, and gives the bits of `expected` for `x` and `weight`."""
    out = torch.empty_like(expected)
    try:
        product(x, weight, None, out, tile)
    except (OutOfResources, AssertionError):  # a descriptor wants rows of whole 16 bytes
        return False
    return same_bits(out, expected)
