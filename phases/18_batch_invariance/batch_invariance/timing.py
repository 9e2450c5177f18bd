"""The time of a product on a GPU: the right bits allow several ways, and the clock chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Writes `x W^T + bias` to `out`: takes `x [T, K]`, `W [N, K]`, `bias [N]` or None, and `out [T, N]`."""

ROWS_AT_ONCE = 4096
"""Rows of all calls of a timing together, or of its one call."""
REPLAYS = 4
"""How often a timing is repeated; the shortest counts."""


def seconds(
    product: Product, weights: Sequence[Tensor], bias: Tensor | None, rows: int
) -> float:
    """Return the time of a product with `rows` rows on a GPU, without the time of launches.

    weights: `[N, K]` each; the mean over several, so that none waits in the GPU's cache.
    """
    outputs, inputs = weights[0].shape
    x = torch.randn(rows, inputs, device=weights[0].device).to(weights[0].dtype)
    out = x.new_empty(rows, outputs)
    weights = weights[: max(1, ROWS_AT_ONCE // rows)]
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
