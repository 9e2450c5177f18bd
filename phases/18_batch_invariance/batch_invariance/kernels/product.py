"""A matrix product that never cuts the sum over K: one program adds all of it, from the first to the last.

How large a tile is does not change the bits of a row (on the GPUs that were measured; each tile is compared
with the first when weights are loaded). What would change them is a second program for the same tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources


@triton.jit
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


class ProductTile(NamedTuple):
    """Block sizes and launch options of `product_kernel`. rows: most rows of a batch for which it is the
    best.
    """

    rows: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


TILES = (
    ProductTile(16, 16, 32, 256, 4, 3),
    ProductTile(64, 64, 32, 128, 4, 3),
    ProductTile(256, 64, 64, 128, 4, 3),
    ProductTile(1 << 62, 128, 256, 64, 8, 3),
)
"""Ascending; the first is the one that the others are compared with."""
FLOAT32_TILES = (ProductTile(1 << 62, 32, 32, 32, 4, 2),)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: ProductTile
) -> None:
    """Write `x W^T + bias` of `x [T, K]`, `weight [N, K]` and `bias [N]` (None: 0) to `out [T, N]`.

    tile: block sizes of the Triton kernel.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    grid = triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, tile.block_n)
    if rows:
        product_kernel[(grid,)](
            out, x, weight, x if bias is None else bias, rows, outputs, inputs,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            BIAS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


class TritonProduct:
    """The fixed product for a shape of weights: a function with one order of sums, in several tile sizes.

    weight: one of this shape, `[N, K]`.
    tiles: those to try; None: the module's. A tile is used if its results have the bits of the first one's.
    """

    def __init__(self, weight: Tensor, tiles: tuple[ProductTile, ...] | None = None) -> None:
        own = FLOAT32_TILES if weight.dtype == torch.float32 else TILES
        first, *others = own if tiles is None else tiles
        generator = torch.Generator(weight.device).manual_seed(1)
        x = torch.randn(256, weight.shape[1], device=weight.device, generator=generator)
        x = x.to(weight.dtype)
        expected = weight.new_empty(len(x), len(weight))
        product(x, weight, None, expected, first)
        agreeing = [tile for tile in others if self._agrees(tile, x, weight, expected)]
        self.tiles = (first, *agreeing)

    @staticmethod
    def _agrees(tile: ProductTile, x: Tensor, weight: Tensor, expected: Tensor) -> bool:
        """Return True if a tile runs on this device, and gives the bits of `expected` for `x` and
        `weight`.
        """
        out = torch.empty_like(expected)
        try:
            product(x, weight, None, out, tile)
        except OutOfResources:
            return False
        return torch.equal(out.view(torch.uint8), expected.view(torch.uint8))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See `linear.Product`: write `x W^T + bias` to `out [T, N]`, by the best tile for `T` rows."""
        tile = next((tile for tile in self.tiles if len(x) <= tile.rows), self.tiles[-1])
        product(x, weight, bias, out, tile)
