"""How long a sum over ranks takes, by size and way: what the limits between the ways are chosen from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.roofline import time_call
from parallel.ranks import PLAIN, Ranks, Reducer

INSIDE = 40
"""Sums in one graph, or between two looks at the clock."""


def times(
    ranks: Ranks, way: str, sizes: list[int], hidden: int, samples: int = 5
) -> dict[int, list[float]]:
    """Microseconds of a sum of so many bytes, some samples of each; run it on all ranks.

    On a GPU they are in a graph. Sizes that the way does not take are left out.
    """
    cuda = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    reducer: Reducer = PLAIN
    most = max(sizes)
    if way == "one-shot":
        from phases.appendix.all_reduce.symmetric import MOST, SymmetricMemoryReducer

        most = MOST
        reducer = SymmetricMemoryReducer(ranks, hidden, dtype)
    found = {}
    for size in sizes:
        if size <= most:
            width = min(hidden, size // dtype.itemsize)
            x = torch.randn(size // dtype.itemsize // width, width, device=ranks.device)
            x = x.to(dtype)
            found[size] = _times(ranks, reducer, x, samples)
    ranks.smallest(0)
    return found


def _times(ranks: Ranks, reducer: Reducer, x: Tensor, samples: int) -> list[float]:
    def work() -> None:
        for _ in range(INSIDE):
            reducer.sum(ranks, x)

    call: Callable[[], None] = work
    if x.device.type == "cuda":
        work()
        torch.cuda.synchronize()
        ranks.smallest(0)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile: that of the process group looks at its events all the time.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        call = graph.replay
    ranks.smallest(0)
    found = time_call(call, x.device, repeats=samples, floor=0.0)
    return [seconds * 1e6 / INSIDE for seconds in found]
