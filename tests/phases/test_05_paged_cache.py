from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from continuous.rows import Rows
from paged_cache import PagedCache, PagedScheduler
from tests.schedules import MAX_LEN, fake_engine, operations, play


@settings(max_examples=300, deadline=None)
@given(
    script=operations,
    rows=st.integers(3, 6),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.integers(0, 20),
    overlap=st.booleans(),
)
def test_any_schedule(script: list[Any], rows: int, block_size: int, spare: int, overlap: bool) -> None:
    blocks = -(-48 // block_size) + spare

    def scheduler(table: Rows) -> PagedScheduler:
        return PagedScheduler(table, PagedCache(rows, MAX_LEN, blocks, block_size), step_tokens=64)

    engine, runner = fake_engine(scheduler, rows, overlap=overlap)
    play(engine, runner, script)
    assert runner.most_in_step <= 64
