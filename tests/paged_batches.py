"""Inputs of paged attention in which everything that may not be read is poisoned, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.work import Work
from forward.attention import LayerSpec
from paged_cache import LayerBlocks, PagedBatch, PagedCache
from paged_cache.reference import paged_attention
from paged_cache.runner import PagedRunner

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GARBAGE = 2**30  # a block id that no pool has
FEATURES: dict[str, dict[str, float]] = {
    "plain": {},
    "window": {"sliding_window": 20},
}


@dataclass
class Batch:
    """Inputs of paged attention in which everything that may not be read is poisoned."""

    q: Tensor
    cache: LayerBlocks
    tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    @property
    def arguments(self) -> tuple[Tensor, LayerBlocks, Tensor, Tensor]:
        return self.q, self.cache, self.tables, self.context_lens

    def layer(self, **features: Any) -> LayerSpec:
        """The layer that the inputs are of, with these features."""
        heads, d = self.q.shape[1:]
        return LayerSpec(0, heads, self.cache.k.shape[2], d, 0.2, **features)


def prepared(rows: RequestRows, cache: PagedCache, works: Sequence[Work]) -> PagedBatch:
    """The inputs of a step, as phase 05's runner makes them."""
    runner = PagedRunner.__new__(PagedRunner)
    runner.rows, runner.cache = rows, cache
    batch = runner.prepare(works)
    assert isinstance(batch, PagedBatch)
    return batch


def step_of(
    rows: RequestRows, cache: PagedCache, spans: Iterable[tuple[int, int]]
) -> PagedBatch:
    """The inputs of a step in which each new request computes `count` tokens from `start` on."""
    works = []
    for number, (start, count) in enumerate(spans):
        end = start + count
        request = Request(number, [1] * end, end, rows.max_len, SamplingParams())
        rows.acquire(request)
        assert cache.reserve(request, end)
        works.append(Work(request, request.row, start, count, (), (request,)))
    return prepared(rows, cache, works)


def make(
    contexts: list[int],
    queries: list[int] | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    d: int = 64,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    queries = queries or [1] * len(contexts)
    width = max(-(-c // block) for c in contexts) + 1
    blocks = len(contexts) * width + 2
    caches = torch.randn(
        2, blocks, block, heads[1], d, generator=generator, dtype=torch.float32
    )
    tables = (
        torch.randperm(blocks, generator=generator)[: len(contexts) * width]
        .view(len(contexts), width)
        .int()
    )
    used = torch.zeros(blocks * block, dtype=torch.bool)
    for b, context in enumerate(contexts):
        slots = tables[b].long()[:, None] * block + torch.arange(block)
        used[slots.flatten()[:context]] = True
        tables[b, -(-context // block) :] = GARBAGE
    caches[:, ~used.view(blocks, block)] = float("nan")
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    q = torch.randn(sum(queries), heads[0], d, generator=generator)
    cache = LayerBlocks(*caches.to(DEVICE, dtype).unbind())
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    return Batch(q.to(DEVICE, dtype), cache, tables.to(DEVICE), lens, starts.to(DEVICE))


def expected(batch: Batch, **options: float | int | None) -> Tensor:
    q, cache, tables, lens = batch.arguments
    return paged_attention(q, cache, tables, batch.query_starts, lens, scale=0.2, **options)  # type: ignore[arg-type]


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN never passes a comparison."""
    return float((out.float() - reference).norm() / reference.norm())


def walled(x: Tensor) -> Tensor:
    """The same numbers in memory that has NaN before and behind them, for whoever reads beyond its end."""
    wall = 256
    memory = torch.full((x.numel() + 2 * wall,), float("nan"), dtype=x.dtype, device=x.device)
    memory[wall:-wall] = x.flatten()
    return memory[wall:-wall].view(x.shape)


def assert_near(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    """Fail unless the relative error is below `limit`, and name the number that is worst."""
    off = error(got, want.float())
    if not off < limit:
        apart = (got.float() - want.float()).abs().nan_to_num(nan=float("inf"))
        at = tuple(int(i) for i in np.unravel_index(int(apart.argmax()), apart.shape))
        mine, theirs = float(got[at]), float(want[at])
        raise AssertionError(
            f"{what}: number {list(at)} is {mine:.4g}, not {theirs:.4g}; off by {off:.1e} in all"
        )


def assert_attention(
    batch: Batch, got: Tensor, limit: float, what: str, **options: float | int | None
) -> None:
    """Fail unless a batch's attention `[T, H, D]` is the oracle's; name the request and the head."""
    want = expected(batch, **options)
    if error(got, want) < limit:
        return
    apart = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(
        nan=float("inf")
    )  # [T, H]
    token, head = divmod(int(apart.argmax()), apart.shape[1])
    request = int(torch.searchsorted(batch.query_starts, token, right=True)) - 1
    wrong, first = int((apart > limit).sum()), int(batch.query_starts[request])
    off = float(apart[token, head])
    keys = int(batch.context_lens[request])
    raise AssertionError(
        f"{what}: request {request} of {keys} keys, query {token - first}, head {head} "
        + (
            "is NaN: too large a number, or one that may not be read"
            if off == float("inf")
            else f"is off by {off:.1e}"
        )
        + f"; {wrong} of {apart.numel()} heads are wrong"
    )
