"""Engines of the scheduling phases, with room, budgets and policies at random, over the fake runner."""

from __future__ import annotations

import random
from collections.abc import Callable

from chunked_prefill import ChunkedScheduler
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import Rows
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


def machine(kind: str, rng: random.Random) -> tuple[Engine, FakeRunner]:
    """An engine that just holds the longest request, or a little more; half of them run ahead."""
    if kind == "04":
        return machine_of_rows(rng)
    policy, overlap = POLICIES[rng.choice(list(POLICIES))], rng.random() < 0.5
    rows = rng.randrange(3, 7)  # at most three samples run together
    block_size = rng.choice([1, 2, 3, 4, 8])
    blocks = -(-MAX_LEN // block_size) + rng.randrange(21)
    cache: PagedCache
    if kind in INDEXES:
        cache = PrefixCache(rows, MAX_LEN, blocks, block_size, INDEXES[kind]())
    else:
        cache = PagedCache(rows, MAX_LEN, blocks, block_size, watermark=rng.choice([0.0, 0.1]))
    step_tokens, chunk_tokens = rng.randrange(2, 31), rng.choice([None, rng.randrange(1, 21)])

    def make_paged(table: Rows) -> PagedScheduler:
        if kind == "05":
            return PagedScheduler(table, cache, step_tokens=MAX_LEN, policy=policy)
        return ChunkedScheduler(
            table, cache, step_tokens=step_tokens, chunk_tokens=chunk_tokens, policy=policy
        )

    return fake_engine(make_paged, rows, overlap=overlap)
