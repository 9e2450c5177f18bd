"""What hostile grammars may take: two seconds and 200 MB each, and nobody else's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import forward
from common.sampling.grammar import Grammar
from paged_cache import PagedEngine
from tests import hostile_grammars
from tests.guidance_kit import loaded

pytest.importorskip("llguidance")

MOST_SECONDS, MOST_BYTES = 2.0, 200e6
GIVEN = hostile_grammars.hostile()


@pytest.fixture(scope="module")
def engine() -> Iterator[PagedEngine]:
    model = forward.load_model("random:tiny", device="cpu", dtype="float32")
    made = loaded(model, max_rows=16, max_len=64, speculate=False)
    hostile_grammars.alone(lambda: Grammar.json_schema({"type": "object"}), made)
    yield made
    assert made.idle and not made.scheduler.running, (
        "a hostile grammar has left something behind"
    )


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.slow
def test_a_hostile_grammar_is_refused_or_served_at_once(
    name: str, engine: PagedEngine
) -> None:
    begun = (
        time.process_time()
    )  # what the machine's other work takes is not the grammar's fault
    _, grown = hostile_grammars.alone(GIVEN[name], engine)
    seconds = time.process_time() - begun
    assert seconds < MOST_SECONDS, (
        f"{name}: {seconds:.2f} s of processor, but at most {MOST_SECONDS}"
    )
    assert grown < MOST_BYTES, f"{name}: the process has grown by {grown / 1e6:.0f} MB"
