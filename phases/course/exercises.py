"""Read the exercises and questions of each phase's `exercises.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.names import choice
from phases import PHASES, ROOT, Phase

FILE = "exercises.toml"


@dataclass(frozen=True)
class Case:
    """A worked example of an exercise: an expression `call` whose value must be that of `expect`.

    setup: code that runs before `call`.
    """

    call: str
    expect: str
    setup: str
    trap: str = ""
    """Words of the lesson's trap that a wrong answer here resembles."""


@dataclass(frozen=True)
class Task:
    """Work that a student gets points for: an exercise (`05.3`) or a question (`05.p1`)."""

    id: str
    points: int

    @property
    def phase(self) -> Phase:
        """Return the phase whose lesson this task belongs to."""
        return PHASES[int(self.id[:2]) - 1]


@dataclass(frozen=True)
class Exercise(Task):
    """An exercise of the course: functions of one file that a student writes, and what judges them.

    It has worked cases (example calls), pytest tests (shown, hidden, and of later phases), three hints, and
    points.
    """

    title: str
    file: str
    """Relative to the checkout."""
    functions: tuple[str, ...]
    """Qualified names in that file: `BlockAllocator.allocate`."""
    invariant: str
    """Hint 1: what must always hold."""
    paragraph: str
    """How the paragraph of the lesson begins that goes with hint 1."""
    pseudocode: str
    """Hint 3, the last."""
    tests: tuple[str, ...]
    """Pytest node ids that a student sees and `check` runs."""
    hidden: tuple[str, ...] = ()
    """Pytest node ids that only `grade` runs; they are not in a student's copy."""
    later: tuple[str, ...] = ()
    """Quick tests of later phases that use these functions."""
    masked: tuple[str, ...] = ()
    """`file:function` of code that would give the answer away: blank too where a copy has the file."""
    cases: tuple[Case, ...] = ()
    example: str = ""
    """Hint 2 where no case is short enough to be one."""

    @property
    def path(self) -> Path:
        """Return the path of the exercise's file in this checkout, with the reference's functions."""
        return ROOT / self.file


@dataclass(frozen=True)
class Question(Task):
    """A question whose answer is a number that a student predicts (`05.p1`) or measures (`05.m1`).

    A reply is right within `tolerance` of a value in the recorded evidence.
    """

    question: str
    evidence: str
    """`h200/05_paged_cache.json` below benchmarks/results."""
    metric: str
    run: Mapping[str, Any]
    """The run's variant, workload and options, as far as they tell it from others."""
    over: Mapping[str, Any]
    """The run that it is divided by; with a `metric` of its own where that differs."""
    tolerance: float
    """How far off an answer may be, as a fraction."""
    why: str
    """The explanation for a student who has found it."""


@cache
def exercises() -> tuple[Exercise, ...]:
    """Return all exercises, those of lower phases first."""
    return tuple(_exercise(phase, raw) for phase in PHASES for raw in _raw(phase, "exercise"))


@cache
def questions() -> tuple[Question, ...]:
    """Return all questions, those of lower phases first."""
    return tuple(Question(**raw) for phase in PHASES for raw in _raw(phase, "question"))


def _raw(phase: Phase, kind: str) -> list[dict[str, Any]]:
    text = (phase.folder / FILE).read_text(encoding="utf-8")
    return tomllib.loads(text).get(kind, [])


def _exercise(phase: Phase, raw: dict[str, Any]) -> Exercise:
    cases = tuple(Case(**case) for case in raw.pop("case", ()))
    for key, made in {
        "tests": _node,
        "hidden": _node,
        "later": _node,
        "masked": _file,
    }.items():
        raw[key] = tuple(made(phase, name) for name in raw.get(key, ()))
    raw |= {"file": _file(phase, raw["file"]), "functions": tuple(raw["functions"])}
    return Exercise(**raw, cases=cases)


def _file(phase: Phase, name: str) -> str:
    return name if name.startswith(("common/", "phases/")) else f"phases/{phase.name}/{name}"


def _node(phase: Phase, name: str) -> str:
    """Return a test's pytest id, such as `tests/phases/test_05_paged_cache.py::test_x`.

    name: `test_x` of the phase's own file, or `test_05_paged_cache:test_x` of another file.
    """
    file, _, test = name.rpartition(":")
    return f"tests/phases/{file or f'test_{phase.name}'}.py::{test}"


def find_question(name: str) -> Question:
    """Return the question with the id `name`.

    Raises:
        UserError: there is no such question; the message has all ids.
    """
    known = {one.id: one for one in questions()}
    return known[choice("question", name, known)]


def of_phases(text: str | None) -> tuple[Exercise, ...]:
    """Return the exercises of the phases in a text such as `5`, `02-05` or `02,05-07`; None: all exercises.

    Raises:
        UserError: the text has another form, or the phases have no exercises.
    """
    if text is None:
        return exercises()
    parts = [
        re.fullmatch(r"\s*(\d{1,2})(?:\s*-\s*(\d{1,2}))?\s*", part) for part in text.split(",")
    ]
    numbers = {
        number
        for part in parts
        if part
        for number in range(int(part[1]), int(part[2] or part[1]) + 1)
    }
    chosen = tuple(one for one in exercises() if one.phase.number in numbers)
    if not all(parts) or not chosen:
        raise UserError(f"--phases is {text!r}, but it must be such as 05, 02-05 or 02,05-07")
    return chosen


def files_of(chosen: Sequence[Exercise]) -> dict[str, dict[str, str]]:
    """Return the functions to blank for the chosen exercises: {file: {qualified name: exercise id}}.

    The id is "" for functions that students neither see nor write.
    """
    found: dict[str, dict[str, str]] = {}
    for exercise in chosen:
        found.setdefault(exercise.file, {}).update(
            dict.fromkeys(exercise.functions, exercise.id)
        )
    for file, _, function in (
        name.partition(":") for exercise in chosen for name in exercise.masked
    ):
        if file in found:
            found[file].setdefault(function, "")
    return found
