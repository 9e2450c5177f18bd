"""What the kernel benchmarks share: a paged pool that does not fit the L2 cache, and timing by graph replay.

A kernel of 10 microseconds cannot be timed by launching it from Python, which takes longer than the kernel.
Here a graph holds many launches, each on other blocks of the pool, and Triton times its replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from common.roofline import time_call
from forward.attention import LayerSpec

L2_BYTES = 60e6


@dataclass
class Case:
    """One attention problem, with as many disjoint sets of blocks as it takes to exceed the L2 cache."""

    q: Tensor  # [T, H, D]
    k_cache: Tensor  # [N, P, KH, D]
    v_cache: Tensor
    tables: list[Tensor]  # each [B, max_blocks] int32
    context_lens: Tensor  # [B] int32
    query_starts: Tensor  # [B + 1] int32
    contexts: list[int]
    query_lens: list[int]

    @property
    def scale(self) -> float:
        """1 / sqrt(D)."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def layer(self) -> LayerSpec:
        """The layer that the problem is of."""
        heads, d = self.q.shape[1:]
        return LayerSpec(0, heads, self.k_cache.shape[2], d, self.scale)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that must be read once, plus queries and outputs."""
        _, _, kv_heads, d = self.k_cache.shape
        tokens = sum(self.contexts)
        return (2 * tokens * kv_heads * d + 2 * self.q.numel()) * self.q.element_size()

    @property
    def flop(self) -> float:
        """Multiplications and additions of the visible scores: 4 D per query head and (query, key) pair."""
        pairs = sum(
            n * c - n * (n - 1) / 2
            for n, c in zip(self.query_lens, self.contexts, strict=True)
        )
        return float(4 * pairs * self.q.shape[1] * self.q.shape[2])


def make_case(
    contexts: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    heads: int,
    kv_heads: int,
    d: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    sets: int | None = None,
    device: str = "cuda",
) -> Case:
    """Random data; every set of blocks is a random permutation of its part of the pool."""
    query_lens = [1] * len(contexts) if query_lens is None else list(query_lens)
    per_request = [-(-c // block_size) for c in contexts]
    blocks = sum(per_request)
    block_bytes = 2 * block_size * kv_heads * d * torch.empty(0, dtype=dtype).element_size()
    if sets is None:
        sets = max(2, min(24, int(4 * L2_BYTES / (blocks * block_bytes)) + 1))
    pool = [
        torch.empty(
            blocks * sets, block_size, kv_heads, d, dtype=dtype, device=device
        ).normal_()
        for _ in range(2)
    ]
    tables = []
    for i in range(sets):
        order = (torch.randperm(blocks) + i * blocks).int()
        table = torch.zeros(len(contexts), max(per_request), dtype=torch.int32)
        at = 0
        for b, n in enumerate(per_request):
            table[b, :n] = order[at : at + n]
            at += n
        tables.append(table.to(device))
    starts = torch.tensor(
        [0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device
    )
    q = torch.randn(sum(query_lens), heads, d, dtype=dtype, device=device)
    lens = torch.tensor(list(contexts), dtype=torch.int32, device=device)
    return Case(q, pool[0], pool[1], tables, lens, starts, list(contexts), query_lens)


def graph_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds per call, one sample per replay, of a graph that runs `calls` in turn."""

    def all_of_them() -> None:
        for call in calls:
            call()

    replays: list[float] = do_bench_cudagraph(all_of_them, return_mode="all")
    return [1e-3 * milliseconds / len(calls) for milliseconds in replays]


def eager_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, count: int, repeats: int
) -> list[float]:
    """Seconds per call, one sample per repeat, of `count` calls launched one after the other."""
    many = list(islice(cycle(calls), count))
    times = time_call(lambda: [call() for call in many], device, repeats=repeats, floor=0.0)
    return [seconds / count for seconds in times]
