"""Tests of matrix products when weights are loaded: inputs, comparison of bits, and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from cuda_graphs.capture import Capturer

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes `x W^T + bias` to `out`: takes `x [T, K]`, `W [N, K]`, `bias [N]` or None, and `out [T, N]`."""

ROWS_AT_ONCE = 2048
"""Most rows of a timing together, if it has several calls, each with another layer's weight: one weight might
stay in the GPU's cache."""
REPLAYS = 4
"""How often a timing is repeated; the shortest counts."""


def random_rows(weight: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return random inputs `[count, K]` for a weight `[N, K]`, in its dtype, the same for a seed."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    x = torch.randn(count, weight.shape[1], device=weight.device, generator=generator)
    return x.to(weight.dtype)


def cancelling_inputs(
    weight: Tensor, bias: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return inputs `[count, K]` and a weight `[N, K]` whose product plus the bias is 0 but for rounding.

    A sum in another order rounds differently in the last bits of float32, and a result of eight bits hides
    that in all but one of some 40,000 numbers. Here every product has its negative at a random position, so
    the errors are all that is left, and a large part of the results differs. All calls return the same.

    weight: gives the shape, dtype and layout. bias: `[N]` or None; one input is 1, and its weight `-bias`.
    """
    half = (weight.shape[1] - (bias is not None)) // 2
    positions = random_rows(weight, 1)[0].argsort()
    one, other = positions[:half], positions[half : 2 * half]
    x, cancelling = weight.new_zeros(count, weight.shape[1]), torch.zeros_like(weight)
    for sign, numbers in ((1, x), (-1, cancelling)):
        drawn = random_rows(numbers[:, :half], len(numbers), seed=sign)
        numbers[:, one], numbers[:, other] = drawn, sign * drawn
    if bias is not None:
        x[:, positions[-1]], cancelling[:, positions[-1]] = 1, -bias
    return x, cancelling


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one dtype and shape have the same bits; 0.0 and -0.0 differ."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def seconds(
    product: Product, weights: Sequence[Tensor], bias: Tensor | None, rows: int
) -> float:
    """Return the seconds that a GPU takes for one product with `rows` rows, without its launch.

    The calls are replayed as a CUDA graph. weights: `[N, K]` each, at least one; each is used in turn.
    """
    weights = weights[: max(1, ROWS_AT_ONCE // rows)]
    x = random_rows(weights[0], rows)
    out = x.new_empty(rows, len(weights[0]))

    def products() -> None:
        for weight in weights:
            product(x, weight, bias, out)

    replay = Capturer(x.device).capture(products)
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return min(times) / len(weights)
