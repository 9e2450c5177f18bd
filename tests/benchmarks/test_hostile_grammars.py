"""What hostile grammars may take: two seconds and 200 MB each, and nobody else's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import forward
from benchmarks import hostile_grammars
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.messages import Output
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


def test_new_ones_are_put_among_known_ones_and_take_nobodys_place() -> None:
    known, new = (hostile_grammars.schemas(50, distinct=False), hostile_grammars.schemas(3, distinct=True))
    mixed = hostile_grammars.among(new, known)
    assert mixed.keys() == known.keys() | new.keys()
    sources = [make().source for make in mixed.values()]
    assert len(sources) == 53 and len(set(sources)) == 1 + 3, "a new one is known"
    places = [number for number, name in enumerate(mixed) if name in new]
    assert places == [14, 29, 44], f"new ones at {places}"


def test_requests_come_while_others_run_and_are_never_all_alike(
    engine: PagedEngine, monkeypatch: Any
) -> None:
    """Who waits for his next token has others beside him until the end, and few of them begin in one step."""
    beside, came, add = list[int](), [0], engine.add

    def counted(prompt: list[int], params: SamplingParams) -> list[Request]:
        came[-1] += params.grammar is not None
        return add(prompt, params)

    def stepped() -> list[Output]:
        beside.append(sum(request.params.grammar is not None for request in engine.scheduler.running))
        came.append(0)
        return type(engine).step(engine)

    monkeypatch.setattr(engine, "add", counted)
    monkeypatch.setattr(engine, "step", stepped)
    hostile_grammars.gaps(engine, hostile_grammars.schemas(120, distinct=False), 60)
    assert max(came) == hostile_grammars.PER_STEP, f"requests that came, by step: {came}"
    assert min(beside[8:58]) >= 3, f"requests beside, by step: {beside}"
    assert len(set(beside[20:58])) > 2, "all come and go at once"
