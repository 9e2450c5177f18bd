"""What hostile grammars may take: two seconds and 200 MB each, and nobody else's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import forward
from benchmarks import hostile_grammars
from paged_cache import PagedEngine
from tests.guidance_kit import loaded

pytest.importorskip("llguidance")

MOST_SECONDS, MOST_BYTES = 2.0, 200e6
GIVEN = hostile_grammars.hostile()


@pytest.fixture(scope="module")
def engine() -> Iterator[PagedEngine]:
    model = forward.load_model("random:tiny", device="cpu", dtype="float32")
    made = loaded(model, max_rows=16, max_len=64, speculate=False)
    hostile_grammars.alone(hostile_grammars.schemas(1, distinct=False)["known 0"], made)
    yield made
    assert made.idle and not made.scheduler.running, "a hostile grammar has left something behind"


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.slow
def test_a_hostile_grammar_is_refused_or_served_at_once(name: str, engine: PagedEngine) -> None:
    begun = time.process_time()  # what the machine's other work takes is not the grammar's fault
    _, grown = hostile_grammars.alone(GIVEN[name], engine)
    seconds = time.process_time() - begun
    assert seconds < MOST_SECONDS, f"{name}: {seconds:.2f} s of processor, but at most {MOST_SECONDS}"
    assert grown < MOST_BYTES, f"{name}: the process has grown by {grown / 1e6:.0f} MB"


@pytest.mark.slow
def test_gaps_are_measured_beside_each_kind(engine: PagedEngine) -> None:
    found = hostile_grammars.measure(engine, tokens=4, turns=2)
    assert list(found) == ["harmless grammars", "new grammars", "hostile grammars", "distinct grammars"]
    assert all(len(metrics["itl_ms_p99"]) == 2 for metrics in found.values())
    assert all(gap > 0 for metrics in found.values() for gap in metrics["itl_ms_p99"])
    for name, metrics in found.items():
        (gap,) = metrics["itl_ms_p99_all_turns"]
        most = max(metrics["itl_ms_max"])
        assert min(metrics["itl_ms_p99"]) <= gap <= most, f"{name}: {gap} ms, but single turns have {metrics}"
    assert max(found["hostile grammars"]["peak_memory_bytes"]) < MOST_BYTES


def test_a_turn_has_grammars_that_no_turn_before_has_had() -> None:
    turns = [
        [hostile_grammars.checked(make) for make in hostile_grammars.unknown(GIVEN, turn).values()]
        for turn in range(3)
    ]
    turns += [
        [make() for make in hostile_grammars.schemas(5, distinct=True, first=5 * turn).values()]
        for turn in range(3)
    ]
    known = [grammar for turn in turns for grammar in turn if grammar is not None]
    assert len(set(known)) == len(known), "an engine remembers a grammar that it has compiled"
    assert [g is None for g in turns[0]] == [g is None for g in turns[2]], "another text is refused"
