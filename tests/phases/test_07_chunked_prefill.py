from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chunked_prefill import ChunkedScheduler
from continuous.rows import Rows
from paged_cache import PagedCache
from tests.schedules import MAX_LEN, fake_engine, operations, play


@settings(max_examples=300, deadline=None)
@given(
    script=operations,
    rows=st.integers(3, 6),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.integers(0, 20),
    step_tokens=st.integers(2, 20),
    chunk_tokens=st.integers(1, 20),
    overlap=st.booleans(),
)
def test_any_schedule(
    script: list[Any],
    rows: int,
    block_size: int,
    spare: int,
    step_tokens: int,
    chunk_tokens: int,
    overlap: bool,
) -> None:
    blocks = -(-MAX_LEN // block_size) + spare

    def scheduler(table: Rows) -> ChunkedScheduler:
        cache = PagedCache(rows, MAX_LEN, blocks, block_size)
        return ChunkedScheduler(table, cache, step_tokens=step_tokens, chunk_tokens=chunk_tokens)

    engine, runner = fake_engine(scheduler, rows, overlap=overlap)
    play(engine, runner, script)
    assert runner.most_in_step <= step_tokens
