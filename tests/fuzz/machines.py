"""Engines of the scheduling phases, with room, budgets and policies at random, over the fake runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from chunked_prefill import ChunkedScheduler
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from paged_cache import PagedCache, PagedScheduler
from prefix_cache import HashIndex, PrefixCache, RadixIndex
from tests.fakes import FakeRunner
from tests.schedules import MAX_LEN, fake_engine, machine_of_rows

INDEXES: dict[str, Callable[[], RadixIndex | HashIndex]] = {
    "08 radix": RadixIndex,
    "08 hash": HashIndex,
    "08 weak hash": lambda: HashIndex(lambda data: sum(data) % 5),  # collides often
}
MACHINES = ("04", "05", "07", *INDEXES)
"""What `machine` makes."""


def paged_engine(
    cache: PagedCache,
    rows: int,
    *,
    chunked: bool = True,
    step_tokens: int = 64,
    chunk_tokens: int | None = None,
    policy: str = "fcfs",
    **options: Any,
) -> tuple[Engine, FakeRunner]:
    """An engine of phase 07 around this cache; not `chunked`: of phase 05."""

    def make(table: RequestRows) -> PagedScheduler:
        given: dict[str, Any] = {"step_tokens": step_tokens, "policy": POLICIES[policy]}
        if chunked:
            return ChunkedScheduler(table, cache, chunk_tokens=chunk_tokens, **given)
        return PagedScheduler(table, cache, **given)

    return fake_engine(make, rows, **{"overlap": False, **options})


def machine(kind: str, rng: random.Random) -> tuple[Engine, FakeRunner]:
    """An engine that just holds the longest request, or a little more; half of them run ahead."""
    if kind == "04":
        return machine_of_rows(rng)
    policy, overlap = rng.choice(list(POLICIES)), rng.random() < 0.5
    rows = rng.randrange(3, 7)  # at most three samples run together
    block_size = rng.choice([1, 2, 3, 4, 8])
    blocks = -(-MAX_LEN // block_size) + rng.randrange(21)
    cache: PagedCache
    if kind in INDEXES:
        cache = PrefixCache(rows, MAX_LEN, blocks, block_size, INDEXES[kind]())
    else:
        cache = PagedCache(rows, MAX_LEN, blocks, block_size, watermark=rng.choice([0.0, 0.1]))
    step_tokens, chunk_tokens = rng.randrange(2, 31), rng.choice([None, rng.randrange(1, 21)])
    options: dict[str, Any] = {"step_tokens": step_tokens, "chunk_tokens": chunk_tokens}
    if kind == "05":
        options = {"step_tokens": MAX_LEN, "chunked": False}
    return paged_engine(cache, rows, policy=policy, overlap=overlap, **options)
