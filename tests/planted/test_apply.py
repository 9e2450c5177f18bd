"""The planted bugs keep step with the code; the first two of each phase are planted, the rest by hand.

The second is planted by `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.course.nursery import Nursery
from tests.planted.planting import ROOT, Bug, DoesNotApply, bugs_of, phases, try_out
from tests.planted.report import PAGE, recorded

each_phase = pytest.mark.parametrize("phase", phases())


@each_phase
def test_every_bug_applies(phase: str) -> None:
    wrong = []
    for bug in bugs_of(phase):
        try:
            bug.plant(ROOT)
        except DoesNotApply as error:
            wrong.append(str(error))
    assert not wrong, f"tests/planted/bugs_{phase}.py must follow the code: " + "; ".join(wrong)
    names = [bug.name for bug in bugs_of(phase)]
    assert len(names) == len(set(names)), f"two bugs of phase {phase} have one name"


@each_phase
def test_the_page_tells_of_every_bug(phase: str) -> None:
    bugs = {bug.name: bug for bug in bugs_of(phase)}
    told = recorded(PAGE.read_text(encoding="utf-8"), phase)
    assert list(told) == list(bugs), f"{PAGE.name} is out of date: run python -m tests.planted {phase}"
    lives = [name for name, killed in told.items() if not killed and not bugs[name].unseen]
    assert not lives, f"phase {phase} has bugs that live without a reason"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.mark.slow  # PyTorch is imported by a process of its own
@pytest.mark.parametrize(
    ("phase", "bug"),
    [
        pytest.param(phase, bug, id=f"{phase}-{bug.name}", marks=[pytest.mark.long] if number else [])
        for phase in phases()
        for number, bug in enumerate(bugs_of(phase)[:2])
    ],
)
def test_the_first_two_die(nursery: Nursery, phase: str, bug: Bug) -> None:
    outcome = try_out(nursery, phase, bug)
    assert outcome.verdict == "killed", f"{bug.name} of phase {phase} {outcome.verdict}: {bug.mistake}"


def test_a_bug_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    with pytest.raises(DoesNotApply, match=r"old text occurs 2 times in code\.py"):
        Bug("twice", "code.py", "1", "2", "").plant(tmp_path)
    with pytest.raises(DoesNotApply, match="does not compile"):
        Bug("broken", "code.py", "a = 1", "a = (", "").plant(tmp_path)
    assert Bug("fits", "code.py", "a = 1", "a = 2", "").plant(tmp_path) == "a = 2\nb = 1\n"
