"""The mutants that are made, and that the tests of every phase notice a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phases import PHASES, ROOT
from tests.mutants.making import choose, mutants_of
from tests.mutants.trying import bench, target

ACCEPTED = Path(__file__).with_name("accepted.txt")
"""Survivors that change nothing a user can see, or only on a GPU or with Ray: a phase and label a line."""
EACH = 5
SOURCE = """
def pay(self, blocks: list[int], most: int = 3) -> int:
    if not self.open:
        raise ValueError("the 1st is closed")
    if self.late and most > 2:
        self.tell(most, blocks)
    return blocks[most:]
"""
EDITS = {
    ("drop-not", "not self.open", "(self.open)"),
    ("negate-condition", "self.late and most > 2", "(not (self.late and most > 2))"),
    ("flip-comparison", "most > 2", "(most >= 2)"),
    ("off-by-one", "2", "3"),
    ("drop-call", "self.tell(most, blocks)", "pass"),
    ("swap-arguments", "self.tell(most, blocks)", "self.tell(blocks, most)"),
    ("off-by-one", "most", "(most + 1)"),
    ("drop-return-value", "return blocks[most:]", "return None"),
}


def test_every_kind_of_mistake_is_made_and_compiles(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(SOURCE, encoding="utf-8")
    made = mutants_of(tmp_path, "code.py")
    assert {(one.operator, one.before, one.after) for one in made} == EDITS
    for one in made:
        text = one.plant(tmp_path).decode()
        compile(text, "code.py", "exec")
        assert text != SOURCE and SOURCE.splitlines()[one.line - 1].strip() not in text


def test_the_choice_stays_when_code_moves(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "code.py").write_text(
        "def new(): pass\n\n\n" + SOURCE, encoding="utf-8"
    )
    here, there = (choose(tmp_path, [file], 3) for file in ("code.py", "room/code.py"))
    assert [one.label for one in here] == [one.label for one in there] and len(here) == 3
    labels = {one.label for one in choose(tmp_path, ["code.py"], 3, seed=1)}
    assert labels != {one.label for one in here}, "another seed chooses others"


@pytest.mark.parametrize("phase", [f"{phase.number:02d}" for phase in PHASES])
def test_a_target_has_files_and_tests(phase: str) -> None:
    aim = target(phase)
    assert aim.files and aim.tests and choose(ROOT, aim.files, 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("phase", [f"{phase.number:02d}" for phase in PHASES])
def test_mutants_die(phase: str) -> None:
    accepted = ACCEPTED.read_text(encoding="utf-8").splitlines()
    with bench(target(phase)) as tests:
        mutants = choose(ROOT, tests.target.files, EACH)
        alive = [
            f"{phase} {one.label}"
            for one in mutants
            if tests.try_out(one).verdict == "survived"
        ]
    assert [label for label in alive if label not in accepted] == []
