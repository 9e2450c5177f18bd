from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunked_prefill import ChunkedScheduler
from continuous.rows import Rows
from prefix_cache import HashIndex, PrefixCache, PrefixIndex, RadixIndex
from tests.schedules import MAX_LEN, fake_engine, operations, play


def weak_digest(data: bytes) -> int:
    """Collides often."""
    return sum(data) % 5


INDEXES = {"radix": RadixIndex, "hash": HashIndex, "weak hash": lambda: HashIndex(weak_digest)}


@pytest.mark.parametrize("index", INDEXES)
@settings(max_examples=200, deadline=None)
@given(
    script=operations,
    rows=st.integers(3, 6),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.integers(0, 20),
    step_tokens=st.integers(2, 30),
    overlap=st.booleans(),
)
def test_any_schedule(
    index: str, script: list[Any], rows: int, block_size: int, spare: int, step_tokens: int, overlap: bool
) -> None:
    blocks = -(-MAX_LEN // block_size) + spare
    made: PrefixIndex = INDEXES[index]()

    def scheduler(table: Rows) -> ChunkedScheduler:
        cache = PrefixCache(rows, MAX_LEN, blocks, block_size, made)
        return ChunkedScheduler(table, cache, step_tokens=step_tokens)

    engine, runner = fake_engine(scheduler, rows, overlap=overlap)
    play(engine, runner, script)
    # Everything is evictable again, and evicting it leaves nothing.
    evicted = made.evict(blocks)
    assert sorted(evicted) == sorted(set(evicted)) and made.evictable == 0 and made.blocks() == []
