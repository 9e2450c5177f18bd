"""Linear layers whose rows do not depend on each other: one order of sums for every number of rows.

A library chooses a kernel by the number of rows. Some of its kernels cut the sum over K into parts and add
these at the end, and so round differently. Which sizes are safe stands in no table: when weights are loaded,
the library's result for each size is compared bit for bit with that of one fixed kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

BLOCK_ROWS = 16
"""Rows of every call of the fixed product on a CPU; fewer are padded."""
SMALL_PIECE = 64
"""Rows below which a rest is left to the fixed product, which is as fast there."""
MOST_NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Most numbers of a result that is compared, by kind of device."""
WINDOWS = 4
NUMBERS = 1 << 14
"""A size is compared for this many windows of a batch, and for this many numbers, at least: where sums have
another order, only some numbers round differently."""

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes `x W^T + bias` to `out`: takes `x [T, K]`, `W [N, K]`, `bias [N]` or None, and `out [T, N]`."""


class RowRange(NamedTuple):
    """The rows `first .. last - 1` of a batch, which one call computes, by the library or by the fixed
    product.
    """

    first: int
    last: int
    by_library: bool


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


def pieces(rows: int, sizes: Sequence[int]) -> Iterator[RowRange]:
    """Yield the ranges of rows by which to compute a batch of `rows` rows, each by one call.

    sizes: ascending, numbers of rows that the library may compute. It gets all rows, or the most that leave
    less than as many; the small rest goes to the fixed product.
    """
    first = 0
    while first < rows:
        left = rows - first
        size = max((size for size in sizes if size <= left), default=0)
        by_library = size == left or size >= max(SMALL_PIECE, left / 2)
        last = first + size if by_library else rows
        yield RowRange(first, last, by_library)
        first = last


class FixedLinear(nn.Module):
    """A linear layer whose rows have the same bits in every batch.

    Args:
        linear: the layer whose weights it takes.
        fixed: the product of one order of sums.
        sizes: numbers of rows for which the library gives the same bits, ascending.
    """

    def __init__(self, linear: nn.Linear, fixed: Product, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.fixed, self.sizes = fixed, tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T + bias`: `[..., K]` -> `[..., N]`."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = flat.new_empty(len(flat), len(self.weight))
        for first, last, by_library in pieces(len(flat), self.sizes):
            product = library if by_library else self.fixed
            product(flat[first:last], self.weight, self.bias, out[first:last])
        return out.view(*x.shape[:-1], -1)


def fix_linears(model: nn.Module, sizes: Sequence[int]) -> None:
    """Replace every `nn.Linear` of a model by a `FixedLinear`, in place; the weights stay.

    sizes: numbers of rows for which to try the library, once for each shape of weights.
    """
    known: dict[tuple[torch.Size, bool], tuple[Product, tuple[int, ...]]] = {}
    found = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for name in found:
        owner, _, last = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        weight, bias = linear.weight, linear.bias
        key = weight.shape, bias is not None
        if key not in known:
            fixed = fixed_product(weight)
            known[key] = fixed, agreeing_sizes(fixed, weight, bias, sizes)
        setattr(model.get_submodule(owner), last, FixedLinear(linear, *known[key]))
