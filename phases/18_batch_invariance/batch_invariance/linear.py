"""Linear layers whose rows do not depend on each other: one order of sums for every number of rows.

A library chooses a kernel by the number of rows. Some of its kernels cut the sum over K into parts and add
these at the end, and so round differently. Which sizes are safe stands in no table: when weights are loaded,
the library's result for each size is compared bit for bit with that of one fixed kernel. Then both are timed,
and a step takes whatever is fastest of what gives these bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batch_invariance.probing import Product, cancelling_inputs, same_bits, seconds

BLOCK_ROWS = 16
"""Rows of every call of the fixed product on a CPU; fewer are padded."""
PADDED = 1.1
"""Time of a library call with padding, relative to one without: the rows must be copied first."""
TIMED_ROWS = (16, 64, 128, 256, 1024)
"""Rows for which fixed products are timed; for more their time grows with the rows."""
MOST_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Most numbers of a result that is compared, by kind of device."""
WINDOWS = 4
NUMBERS = 1 << 14
"""A size is compared for this many windows of a batch, and for this many numbers, at least: where sums have
another order, only some numbers round differently."""


class RowRange(NamedTuple):
    """The rows `first .. last - 1` of a batch, which one product call computes.

    size: rows of a call of the library (PyTorch's product), padded if the range has fewer; 0: a fixed product
        (one with a fixed order of sums) computes them.
    """

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class ProductCosts:
    """Times of products with weights of one shape, by the rows of a call, in any unit.

    library: of PyTorch's product, for the sizes that give the bits of the fixed products (those with a fixed
        order of sums).
    fixed: of the fastest fixed product, for some sizes, at least one. products: by the same sizes, the
        function of that product.
    """

    library: Mapping[int, float]
    fixed: Mapping[int, float]
    products: Mapping[int, Product] = field(default_factory=dict)
    _plans: dict[int, list[RowRange]] = field(default_factory=dict)

    def timed_size(self, rows: int) -> int:
        """Return the smallest timed number of rows that is at least `rows`; if there is none, the largest."""
        return min((size for size in self.fixed if size >= rows), default=max(self.fixed))

    def of_fixed(self, rows: int) -> float:
        """Return the time of the fastest fixed product (with a fixed order of sums) for `rows` rows."""
        size = self.timed_size(rows)
        return self.fixed[size] * max(1.0, rows / size)

    def product(self, call: RowRange) -> Product:
        """Return the function that computes the rows of `call`: PyTorch's product, or a fixed one."""
        if call.size:
            return library
        return self.products[self.timed_size(call.last - call.first)]

    def plan(self, rows: int) -> list[RowRange]:
        """Return the fastest calls (`RowRange`s) for a batch of `rows` rows, found once and kept."""
        if rows not in self._plans:
            self._plans[rows] = fastest_calls(self, 0, rows)[1]
        return self._plans[rows]


def library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write `x W^T + bias` (`weight [N, K]`) to `out [rows, N]` by PyTorch.

    PyTorch may choose its kernel, and so the order of the sums, by the number of rows.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write `x W^T + bias` (`weight [N, K]`) to `out` by PyTorch calls of `BLOCK_ROWS` rows each.

    The last call is padded, so PyTorch always has the same number of rows to choose a kernel by.
    """
    padded = F.pad(x, (0, 0, 0, -len(x) % BLOCK_ROWS))
    result = out.new_empty(len(padded), len(weight))
    for first in range(0, len(x), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        library(padded[block], weight, bias, result[block])
    out.copy_(result[: len(x)])


def fixed_products(weight: Tensor) -> list[Product]:
    """Return product functions with one order of sums for weights of this shape, all with the same bits.

    They take (x, weight, bias, out), and write `x W^T + bias` to `out`. On a GPU they are Triton kernels,
    else only `in_blocks`.
    """
    if not weight.is_cuda:
        return [in_blocks]
    from batch_invariance.kernels.product import tiled_products

    return tiled_products(weight)


def agreeing_sizes(
    fixed: Product, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return those of `sizes` for which PyTorch's product has the bits of the product `fixed`, ascending.

    sizes: numbers of rows of a call. weight, bias: of the layer.
    Each size is compared for several windows of a batch of `cancelling_inputs`: a result that depends on the
    position of a row would differ, too.
    """
    outputs = len(weight)
    most = MOST_NUMBERS.get(weight.device.type, 0) // outputs
    sizes = sorted({size for size in sizes if size <= most})
    if not sizes:
        return ()
    count = min(max(WINDOWS * sizes[-1], NUMBERS // outputs), most)
    x, weight = cancelling_inputs(weight, bias, count)
    expected = weight.new_empty(count, outputs)
    fixed(x, weight, bias, expected)

    def agrees(size: int) -> bool:
        out = weight.new_empty(size, outputs)
        windows = max(WINDOWS, NUMBERS // (size * outputs))
        agreed = True
        for first in range(0, count - size + 1, max(1, (count - size) // windows)):
            library(x[first : first + size], weight, bias, out)
            agreed &= same_bits(out, expected[first : first + size])
        return agreed

    return tuple(filter(agrees, sizes))


def fastest_calls(costs: ProductCosts, first: int, last: int) -> tuple[float, list[RowRange]]:
    """Return (time, calls) of the fastest way to compute the rows `first .. last - 1` of a batch.

    The time is in the unit of `costs`; the calls are `RowRange`s in order, none if there are no rows.
    Three ways are compared: the fixed product (with a fixed order of sums); one library call (PyTorch's
    product), padded to the next size of `costs`; and library calls of the size below, as many as are full,
    with the fastest calls for the rows left.
    """
    rows = last - first
    if not rows:
        return 0.0, []
    ways = [(costs.of_fixed(rows), [RowRange(first, last, 0)])]
    above = min((size for size in costs.library if size >= rows), default=0)
    if above:
        factor = 1.0 if above == rows else PADDED
        ways.append((costs.library[above] * factor, [RowRange(first, last, above)]))
    below = max((size for size in costs.library if size < rows), default=0)
    if below:
        cut = last - rows % below
        whole = [RowRange(at, at + below, below) for at in range(first, cut, below)]
        rest_time, rest = fastest_calls(costs, cut, last)
        ways.append((costs.library[below] * len(whole) + rest_time, whole + rest))
    return min(ways, key=lambda way: way[0])


def measured_costs(
    weights: Sequence[Tensor], bias: Tensor | None, sizes: Sequence[int]
) -> ProductCosts:
    """Find the sizes for which PyTorch's product has the bits of the fixed product, and time both.

    weights, bias: `[N, K]` each, of the layers with this shape; `[N]` or None. sizes: numbers of rows to try.
    On a CPU nothing is timed: there one call for all rows is faster than several.

    Returns:
        The times, in seconds on a GPU.
    """
    one = weights[0]
    products = fixed_products(one)
    agreeing = agreeing_sizes(products[0], one, bias, sizes)
    if not one.is_cuda:
        costs = {size: float(size) for size in agreeing}
        return ProductCosts(costs, {1: 2.0}, {1: products[0]})
    fixed, fastest = {}, {}
    for size in TIMED_ROWS:
        times = {seconds(product, weights, bias, size): product for product in products}
        fixed[size] = min(times)
        fastest[size] = times[fixed[size]]
    costs = {size: seconds(library, weights, bias, size) for size in agreeing}
    return ProductCosts(costs, fixed, fastest)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, costs: ProductCosts) -> Tensor:
    """Return `x W^T + bias`, `[..., K]` -> `[..., N]`, by the fastest calls that add in the fixed order.

    costs: times of products with weights of this shape.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    plan = costs.plan(len(flat))
    end = max([len(flat), *(call.first + call.size for call in plan)])
    out = flat.new_empty(end, len(weight))
    for call in plan:
        rows = flat[call.first : call.last]
        if call.size > len(rows):
            padded = flat.new_empty(call.size, flat.shape[1])
            padded[: len(rows)] = rows
            rows = padded
        costs.product(call)(rows, weight, bias, out[call.first : call.first + len(rows)])
    return out[: len(flat)].view(*x.shape[:-1], -1)


class FixedLinear(nn.Module):
    """A linear layer whose rows have the same bits in every batch.

    linear: the layer whose weights it takes. costs: times of products with weights of this shape.
    """

    def __init__(self, linear: nn.Linear, costs: ProductCosts) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.costs = costs

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T + bias`: `[..., K]` -> `[..., N]`."""
        return multiply(x, self.weight, self.bias, self.costs)
