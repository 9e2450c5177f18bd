"""Every exercise: its reference earns full marks, its blank none, whatever is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phases import PHASES, Phase
from phases.course.blanks import blank
from phases.course.checking import _of_case, _record, check, copy_reference
from phases.course.exercises import Exercise, exercises
from phases.course.fork_server import ForkServer
from phases.course.grading import EARNED
from tests.course.proof import blank_fails, reference_passes

EACH = pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.id)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Under another seed than the suite's."""
    with ForkServer(seed=1) as started:
        yield started


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the reference, in which runs can write nothing that another would read."""
    folder = tmp_path_factory.mktemp("copy").resolve()
    copy_reference(folder)
    return folder


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """Tests that an earlier phase names as well: of the same reference they say the same."""
    return set()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_the_reference_passes_all_cases_and_tests_of_a_phase(
    phase: Phase, server: ForkServer, copy: Path, passed: set[str]
) -> None:
    """The tests together, once; a test that is named is there."""
    chosen = [one for one in exercises() if one.phase is phase]
    named = dict.fromkeys(
        node for one in chosen for node in (*one.tests, *one.hidden, *one.later)
    )
    nodes = [node for node in named if node not in passed]
    cases = tuple(case for one in chosen for case in one.cases)
    whole = replace(chosen[0], cases=cases)
    found = _record(copy, whole, [], server, 300)
    ran = _record(copy, whole, nodes, server, 300)
    assert not found["ended"] and not ran["ended"], (found["ended"], ran["ended"])
    for case, said in zip(cases, found["cases"], strict=True):
        assert _of_case(whole, case, said) is None, f"{case.call}: {said}"
    failed = {name: said for name, said in ran["tests"].items() if said["outcome"] == "failed"}
    assert not failed
    missing = [
        node
        for node in nodes
        if not any(f"{name}[".startswith(f"{node}[") for name in ran["tests"])
    ]
    assert not missing, f"tests that an exercise names, and that are gone: {missing}"
    passed.update(nodes)


@EACH
def test_a_blank_earns_nothing(exercise: Exercise) -> None:
    """It counts as not started; `test_ten_seeds` runs it all the same."""
    source = exercise.path.read_text(encoding="utf-8")
    made = blank(source, dict.fromkeys(exercise.functions, exercise.id))
    verdict = check(exercise, made, None, hidden=True)  # type: ignore[arg-type]
    assert verdict.state == "not started" and EARNED.get(verdict.state, 0) == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@EACH
def test_ten_seeds(exercise: Exercise) -> None:
    """The reference has all points under ten seeds, within its minute each, and the blank has none."""
    for seed in range(10):
        with ForkServer(seed) as server:
            verdict = reference_passes(exercise, server)
            assert verdict.right, f"seed {seed}: {verdict.failure}"
            if seed == 0:
                assert blank_fails(exercise, server).state == "fails"
