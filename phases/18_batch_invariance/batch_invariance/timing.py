"""The time of a product on a GPU: the right bits allow several ways, and the clock chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes `x W^T + bias` to `out`: takes `x [T, K]`, `W [N, K]`, `bias [N]` or None, and `out [T, N]`."""

ROWS_AT_ONCE = 4096
"""Most rows of all calls of a timing together, or of its one call."""
WEIGHTS_AT_ONCE = 8
"""Most calls of a timing, each with another layer's weight: one weight might stay in the GPU's cache."""
REPEATED_MS = 1
"""Milliseconds for which calls are repeated in one graph, at least once."""


def random_rows(weight: Tensor, count: int) -> Tensor:
    """Return `count` rows of random inputs for a weight `[N, K]`: `[count, K]`, the same in every call."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(count, weight.shape[1], device=weight.device, generator=generator)
    return x.to(weight.dtype)


def milliseconds(
    product: Product, weights: Sequence[Tensor], bias: Tensor | None, rows: int
) -> float:
    """Return the time of a product with `rows` rows on a GPU, without the time of launches.

    weights: `[N, K]` each, at least one.
    """
    from triton.testing import do_bench_cudagraph

    weights = weights[: max(1, min(WEIGHTS_AT_ONCE, ROWS_AT_ONCE // rows))]
    x = random_rows(weights[0], rows)
    out = x.new_empty(rows, len(weights[0]))

    def multiply_all() -> None:
        for weight in weights:
            product(x, weight, bias, out)

    took: float = do_bench_cudagraph(multiply_all, rep=REPEATED_MS, return_mode="min")
    return took / len(weights)
