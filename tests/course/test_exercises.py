"""The exercises as data: they follow the code, lessons, tests and evidence, and the page tells of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache

import pytest

from phases import PHASES, ROOT, Phase
from phases.course.exercises import Exercise, Question, exercises, questions
from phases.course.grading import is_right, truth
from phases.course.hints import LEVELS, hint
from tests.course.proof import PAGE, block, listed, recorded, untried
from tests.course.slips import DoesNotApply, slips_of, spans

each = pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.id)


def test_three_to_eight_a_phase() -> None:
    counts = Counter(exercise.phase.number for exercise in exercises())
    wrong = {phase.name: counts[phase.number] for phase in PHASES}
    assert all(3 <= count <= 8 for count in wrong.values()), wrong
    ids = [one.id for one in (*exercises(), *questions())]
    assert len(ids) == len(set(ids)), "two exercises have one id"


@cache
def functions_of(file: str) -> set[str]:
    return set(
        re.findall(
            r"^ *(?:async )?def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M
        )
    )


@each
def test_an_exercise_follows_the_code(exercise: Exercise) -> None:
    source = exercise.path.read_text(encoding="utf-8")
    places = list(spans(source, exercise.functions))
    assert len(places) == len(exercise.functions), (
        f"{exercise.id}: {exercise.file} has no such function"
    )
    assert exercise.id[:2] == f"{exercise.phase.number:02d}"
    for name in exercise.masked:
        file, _, function = name.partition(":")
        assert list(spans((ROOT / file).read_text(encoding="utf-8"), [function])), (
            f"{exercise.id}: no {name}"
        )
    for node in (*exercise.tests, *exercise.hidden, *exercise.later):
        file, _, test = node.partition("::")
        assert test.partition("[")[0] in functions_of(file), (
            f"{exercise.id}: there is no test {node}"
        )
    assert exercise.points > 0 and exercise.tests


@each
def test_an_exercise_has_all_hints(exercise: Exercise) -> None:
    for level in range(1, LEVELS + 1):
        assert hint(exercise, level).strip(), f"{exercise.id} has no hint {level}"
    assert exercise.cases or exercise.example
    # A copy withholds measurements.md, so the paragraph must stand in the lesson itself.
    lesson = (exercise.phase.folder / "README.md").read_text(encoding="utf-8")
    begins = re.escape(exercise.paragraph.replace("*", ""))
    assert len(re.findall(rf"\n\n[- ]*{begins}", lesson.replace("*", ""))) == 1, (
        "no such paragraph"
    )


@each
def test_mistakes_apply_and_are_in_the_functions(exercise: Exercise) -> None:
    source, slips = exercise.path.read_text(encoding="utf-8"), slips_of(exercise)
    places, lines = list(spans(source, exercise.functions)), source.splitlines()
    assert len(slips) >= 5, f"{exercise.id}: {len(slips)} mistakes are planted"
    assert len({slip.name for slip in slips}) == len(slips)
    for slip in slips:
        try:
            planted = slip.plant(exercise)
        except DoesNotApply as error:
            raise AssertionError(f"tests/course must follow the code: {error}") from None
        pairs = zip(lines, planted.splitlines(), strict=False)
        changed = next(
            at for at, (before, after) in enumerate(pairs, start=1) if before != after
        )
        inside = any(first <= changed <= last for first, last in places)
        assert inside, f"{slip.name} is outside of {exercise.id}"


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.id)
def test_the_evidence_knows_the_answer(question: Question) -> None:
    known = truth(question)
    assert math.isfinite(known) and known > 0
    assert is_right(question, known) and not is_right(
        question, known * (1.01 + question.tolerance)
    )


def test_phases_with_evidence_have_questions_of_both_kinds() -> None:
    kinds = {(question.phase.number, question.id[3]) for question in questions()}
    assert kinds >= {(number, kind) for number in range(1, 14) for kind in "pm"}


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_lessons_list_their_exercises(phase: Phase) -> None:
    told = listed(phase)
    assert told is not None or phase.number > 9, f"{phase.name} has no list of exercises"
    assert told in (None, block(phase)), (
        f"run python -m tests.course --list {phase.number:02d}"
    )


def test_a_milestones_points_are_those_of_its_exercises() -> None:
    page = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    points = {exercise.id: exercise.points for exercise in exercises()}
    rows = re.findall(r"^\|[^|]*\|[^|]*\| (\d\d\.\d[^|]*) \| (\d+) \|", page, re.M)
    assert len(rows) >= 10
    for said, total in rows:
        ids = []
        for first, last in re.findall(r"(\d\d\.\d)(?: to (\d\d\.\d))?", said):
            ids += [one for one in points if first <= one <= (last or first)]
        assert sum(points[one] for one in ids) == int(total), f"{said}: {total}"


def test_the_page_tells_of_every_exercise() -> None:
    page = PAGE.read_text(encoding="utf-8")
    told = recorded(page)
    open_ones = untried(page)
    assert sorted([*told, *open_ones]) == [one.id for one in exercises()], (
        "run python -m tests.course"
    )
    for exercise in exercises():
        if exercise.id in open_ones:  # the page says so
            continue
        names = [slip.name for slip in slips_of(exercise)]
        assert list(told[exercise.id]) == names, (
            f"run python -m tests.course {exercise.id[:2]}"
        )
        alive = [name for name, killed in told[exercise.id].items() if not killed]
        assert not alive, f"{exercise.id} accepts {alive}"


OPEN = re.compile(r"<!-- /exercises -->(.*?)^## 8\.", re.DOTALL | re.MULTILINE)
NUMBERED = re.compile(r"^(\d+)\. ", re.MULTILINE)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_every_open_exercise_has_an_answer(phase: Phase) -> None:
    """For teachers: as many as the lesson asks, in its order, and the tests that an answer names exist."""
    found = OPEN.search((phase.folder / "README.md").read_text(encoding="utf-8"))
    assert found
    page = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
    (answers,) = re.findall(
        rf"^## {phase.number:02} · .*?\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    assert NUMBERED.findall(answers) == NUMBERED.findall(found[1])
    named = set(re.findall(r"`(test_\w+)`", answers))
    assert named <= known_tests(), sorted(named - known_tests())


@cache
def known_tests() -> set[str]:
    files = ROOT.glob("tests/phases/*.py")
    return {
        name
        for path in files
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
