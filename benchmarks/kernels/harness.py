"""What the kernel benchmarks share: a paged pool that does not fit the L2 cache, and timing by graph replay.

A kernel of 10 microseconds cannot be timed by launching it from Python, which takes longer than the kernel.
Here a graph holds many launches, each on other blocks of the pool, and Triton times its replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from triton.testing import do_bench_cudagraph

from common.roofline import time_call
from forward.attention import LayerSpec

L2_BYTES = 60e6
HEADS, KV_HEADS = 16, 8
D = 128
"""Of Qwen3-0.6B."""


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
    def layer(self) -> LayerSpec:
        """The layer that the problem is of."""
        heads, d = self.q.shape[1:]
        return LayerSpec(0, heads, self.k_cache.shape[2], d, d**-0.5)

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
    contexts: list[int],
    block_size: int,
    query_lens: list[int] | None = None,
    sets: int | None = None,
    **made: Any,
) -> Case:
    """Random data; every set of blocks is a random permutation of its part of the pool.

    made: dtype and device of all tensors.
    """
    query_lens = query_lens or [1] * len(contexts)
    per_request = [-(-c // block_size) for c in contexts]
    blocks = sum(per_request)
    if sets is None:
        block_bytes = 2 * block_size * KV_HEADS * D * made["dtype"].itemsize
        sets = max(2, min(24, int(4 * L2_BYTES / (blocks * block_bytes)) + 1))
    keys, values = torch.randn(2, blocks * sets, block_size, KV_HEADS, D, **made)
    orders = (torch.randperm(blocks) + first for first in range(0, blocks * sets, blocks))
    tables = [
        pad_sequence([*torch.split(order, per_request)], batch_first=True)
        .int()
        .to(keys.device)
        for order in orders
    ]
    starts, lens = (
        torch.tensor(each, dtype=torch.int32, device=keys.device)
        for each in ([0, *accumulate(query_lens)], contexts)
    )
    q = torch.randn(sum(query_lens), HEADS, D, **made)
    return Case(q, keys, values, tables, lens, starts, contexts, query_lens)


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
