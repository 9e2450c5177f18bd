"""Linear layers whose rows do not depend on each other: one order of sums for every number of rows.

A library chooses a kernel by the number of rows. Some of its kernels cut the sum over K into parts and add
these at the end, and so round differently. Which sizes are safe stands in no table: when weights are loaded,
the library's result for each size is compared bit for bit with that of one fixed kernel. Then both are timed,
and a step takes whatever is fastest of what gives these bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

BLOCK_ROWS = 16
"""Rows of every call of the fixed product on a CPU; fewer are padded."""
PADDED = 1.1
"""Time of a library call with padding, relative to one without: the rows must be copied first."""
TIMED_ROWS = 1024
"""Rows up to which the fixed product is timed; for more its time grows with the rows."""
TIMED_BYTES = 1 << 28
"""Weights that a timing reads, if a model has so many of one shape: more than a GPU's caches hold."""
REPLAYS = 4
"""How often a timing is repeated; the shortest counts."""
MOST_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Most numbers of a result that is compared, by kind of device."""
WINDOWS = 4
NUMBERS = 1 << 14
"""A size is compared for this many windows of a batch, and for this many numbers, at least: where sums have
another order, only some numbers round differently."""

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes `x W^T + bias` to `out`: takes `x [T, K]`, `W [N, K]`, `bias [N]` or None, and `out [T, N]`."""


class RowRange(NamedTuple):
    """The rows `first .. last - 1` of a batch, which one call computes.

    size: rows of the library's call, which are padded if there are fewer; 0: the fixed product computes them.
    """

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class ProductCosts:
    """Times of the two products with weights of one shape, by the rows of a call, in any unit.

    library: for the sizes that give the fixed product's bits. fixed: for some sizes, at least one.
    """

    library: Mapping[int, float]
    fixed: Mapping[int, float]
    _plans: dict[int, list[RowRange]] = field(default_factory=dict)

    def of_fixed(self, rows: int) -> float:
        """Return the time of the fixed product: that of the next size that was timed, or in proportion."""
        size = min((size for size in self.fixed if size >= rows), default=max(self.fixed))
        return self.fixed[size] * max(1.0, rows / size)

    def plan(self, rows: int) -> list[RowRange]:
        """Return the calls for a batch of `rows` rows; see `fastest_calls`."""
        if rows not in self._plans:
            self._plans[rows] = fastest_calls(self, 0, rows)[1]
        return self._plans[rows]


def library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write `x W^T + bias` (`weight [N, K]`) to `out` by PyTorch, which may choose its kernel by the number
    of rows.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write `x W^T + bias` (`weight [N, K]`) to `out` by library calls of `BLOCK_ROWS` rows each, so that the
    library has nothing to choose.
    """
    rows = len(x)
    padded = x.new_zeros(-(-rows // BLOCK_ROWS) * BLOCK_ROWS, x.shape[1])
    padded[:rows] = x
    result = out.new_empty(BLOCK_ROWS, len(weight))
    for first in range(0, rows, BLOCK_ROWS):
        library(padded[first : first + BLOCK_ROWS], weight, bias, result)
        part = out[first : first + BLOCK_ROWS]
        part.copy_(result[: len(part)])


def fixed_product(weight: Tensor) -> Product:
    """Return the product with one order of sums for weights like this: a Triton kernel on a GPU, else
    `in_blocks`.
    """
    if not weight.is_cuda:
        return in_blocks
    from batch_invariance.kernels.product import TritonProduct

    return TritonProduct(weight)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one dtype and shape have the same bits; 0.0 and -0.0 differ."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def agreeing_sizes(
    fixed: Product, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return those of `sizes` (numbers of rows), ascending, for which the library has the fixed product's
    bits.

    weight, bias: of the layer. Each size is compared for several windows of a batch of random rows: a result
    that depends on the position of a row would differ, too.
    """
    outputs, inputs = weight.shape
    most = MOST_NUMBERS.get(weight.device.type, 0) // outputs
    sizes = sorted({size for size in sizes if size <= most})
    if not sizes:
        return ()
    generator = torch.Generator(weight.device).manual_seed(0)
    count = min(max(WINDOWS * sizes[-1], NUMBERS // outputs), most)
    x = torch.randn(count, inputs, device=weight.device, generator=generator).to(weight.dtype)
    expected = weight.new_empty(count, outputs)
    fixed(x, weight, bias, expected)
    found = []
    for size in sizes:
        out = weight.new_empty(size, outputs)
        windows = max(WINDOWS, NUMBERS // (size * outputs))
        step = max(1, (count - size) // windows)
        firsts = range(0, count - size + 1, step)
        if all(
            _agrees(x[first : first + size], weight, bias, out, expected[first:])
            for first in firsts
        ):
            found.append(size)
    return tuple(found)


def _agrees(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, expected: Tensor
) -> bool:
    library(x, weight, bias, out)
    return same_bits(out, expected[: len(x)])


def fastest_calls(costs: ProductCosts, first: int, last: int) -> tuple[float, list[RowRange]]:
    """Return the fastest calls for the rows `first .. last - 1` of a batch, and their time.

    The choice is between the fixed product, the library with padding up to the next size of `costs`, and the
    library for as many whole pieces of the size below as there are, with the fastest calls for what is left.
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
    fixed: Product, weights: Sequence[Tensor], bias: Tensor | None, sizes: Sequence[int]
) -> ProductCosts:
    """Ask which of `sizes` (numbers of rows) the library may compute, and time both products.

    weights: `[N, K]` each, of the layers with this shape. A CPU is not timed: there one call for all rows
        is faster than several.
    """
    one = weights[0]
    agreeing = agreeing_sizes(fixed, one, bias, sizes)
    if not one.is_cuda:
        return ProductCosts({size: float(size) for size in agreeing}, {1: 2.0})
    several = weights[: max(1, TIMED_BYTES // one.nbytes)]
    timed = sorted({1, TIMED_ROWS, *(size for size in sizes if size < TIMED_ROWS)})
    return ProductCosts(
        {size: seconds(library, several, bias, size) for size in agreeing},
        {size: seconds(fixed, several, bias, size) for size in timed},
    )


def seconds(
    product: Product, weights: Sequence[Tensor], bias: Tensor | None, rows: int
) -> float:
    """Return the time of a product with `rows` rows on a GPU, the mean over several weights `[N, K]`, without
    the time of launches.
    """
    outputs, inputs = weights[0].shape
    x = torch.randn(rows, inputs, device=weights[0].device).to(weights[0].dtype)
    out = x.new_empty(rows, outputs)
    weights = weights[: max(1, TIMED_ROWS // rows)]
    product(x, weights[0], bias, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for weight in weights:
            product(x, weight, bias, out)
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) / len(weights)


class FixedLinear(nn.Module):
    """A linear layer whose rows have the same bits in every batch.

    Args:
        linear: the layer whose weights it takes.
        fixed: the product of one order of sums.
        costs: sizes for which the library gives the same bits, and what both products take.
    """

    def __init__(self, linear: nn.Linear, fixed: Product, costs: ProductCosts) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.fixed, self.costs = fixed, costs

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T + bias`: `[..., K]` -> `[..., N]`."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        plan = self.costs.plan(len(flat))
        ends = [first + size for first, _, size in plan]
        out = flat.new_empty(max(len(flat), *ends, 0), len(self.weight))
        for first, last, size in plan:
            part = flat[first:last]
            if size > len(part):
                part = flat.new_empty(size, flat.shape[1])
                part[: last - first] = flat[first:last]
            product = library if size else self.fixed
            product(part, self.weight, self.bias, out[first : first + len(part)])
        return out[: len(flat)].view(*x.shape[:-1], -1)


def fix_linears(model: nn.Module, sizes: Sequence[int]) -> None:
    """Replace every `nn.Linear` of a model by a `FixedLinear`, in place; the weights stay.

    sizes: numbers of rows for which to try the library, once for each shape of weights.
    """
    shapes: dict[tuple[torch.Size, bool], list[tuple[str, nn.Linear]]] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            shapes.setdefault((part.weight.shape, part.bias is not None), []).append(
                (name, part)
            )
    for linears in shapes.values():
        weights = [linear.weight for _, linear in linears]
        fixed = fixed_product(weights[0])
        costs = measured_costs(fixed, weights, linears[0][1].bias, sizes)
        for name, linear in linears:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, FixedLinear(linear, fixed, costs))
