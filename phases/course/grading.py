"""Scores of a working copy: all tests, in a fresh copy of the reference with the named functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from phases.course.answers import given, is_right, truth
from phases.course.checking import State, Verdict, check_file
from phases.course.exercises import Exercise
from phases.course.hints import logged
from phases.course.making import Copy, fingerprint, made_files, opened, text_in
from phases.course.nursery import Nursery

EARNED: dict[State, float] = {"passes here": 1.0, "breaks a later phase": 0.5}
"""The part of the points; nothing in other states."""


@dataclass(frozen=True)
class Score:
    """The points of an exercise or a question, and the reason for each that is missing."""

    id: str
    title: str
    points: float
    most: int
    state: str
    reason: str = ""
    hints: int = 0
    solution_shown: bool = False
    guesses: int = 0
    """Answers that were given to a question; the last counts."""


def changed_tests(copy: Copy, made: dict[str, str]) -> dict[str, str]:
    """The files of tests that are not as they were made, and what became of them.

    They are never run. But who changes a test has not understood what it is for, or has understood too well.
    """
    found = {}
    for file, text in made.items():
        path = copy.folder / file
        if file.startswith("tests/"):
            try:
                same = text_in(copy.folder, file) == text
            except (OSError, UnicodeDecodeError):
                same = False
            if not same:
                found[file] = "was changed" if path.exists() else "was removed"
    return found


def grade(folder: Path, nursery: Nursery) -> list[Score]:
    """The scores of a working copy, exercises first.

    Raises:
        UserError: it is none, or it was made from another version of the course.
    """
    copy = opened(folder)
    made = made_files(copy.exercises)
    if fingerprint(made) != copy.made_from:
        raise UserError(f"{folder} was made from another version of the course: grade it with that one")
    changed = changed_tests(copy, made)
    scores = [score(copy, exercise, changed, nursery) for exercise in copy.exercises]
    answers = given(folder)
    for question in copy.questions:
        right = question.id in answers and is_right(question, answers[question.id])
        state = "passes" if right else "fails" if question.id in answers else "not started"
        reason = "" if right else f"{answers[question.id]:g}" if question.id in answers else ""
        if reason:
            reason += f" is not within {question.tolerance:.0%} of the evidence ({truth(question):.3g})"
        points = question.points if right else 0
        guesses = len(logged(folder, question.id, "answer"))
        about = (question.id, question.question, points, question.points, state, reason)
        scores.append(Score(*about, guesses=guesses))
    return scores


def score(copy: Copy, exercise: Exercise, changed: dict[str, str], nursery: Nursery) -> Score:
    """The score of one exercise."""
    hints, shown = logged(copy.folder, exercise.id, "hint"), logged(copy.folder, exercise.id, "solution")
    about = (exercise.id, exercise.title)
    more = {"hints": len({str(one.get("level")) for one in hints}), "solution_shown": bool(shown)}
    for node in exercise.tests:
        file = node.partition("::")[0]
        if file in changed:
            return Score(*about, 0, exercise.points, "refused", f"{file} {changed[file]}", **more)  # type: ignore[arg-type]
    verdict = check_file(copy.folder, exercise, nursery, hidden=True)
    points = exercise.points * EARNED.get(verdict.state, 0.0)
    return Score(*about, points, exercise.points, verdict.state, reason_of(verdict), **more)  # type: ignore[arg-type]


def reason_of(verdict: Verdict) -> str:
    """In a line, what went wrong."""
    failure = verdict.failure
    if failure is None:
        return ""
    said = failure.message or f"{failure.call}: expected {failure.expected}, got {failure.got}"
    return f"{failure.test}: {said}" if failure.test else said


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """Everything, for a machine."""
    total, most = sum(one.points for one in scores), sum(one.most for one in scores)
    return {"points": total, "of": most, "exercises": [vars(one) for one in scores]}


def as_gradescope(scores: Sequence[Score]) -> dict[str, Any]:
    """The form of Gradescope's results.json. Reasons are shown, and tests are not."""
    return {
        "score": sum(one.points for one in scores),
        "tests": [
            {
                "name": f"{one.id} {one.title}",
                "score": one.points,
                "max_score": one.most,
                "status": "passed" if one.points == one.most else "failed",
                "output": ": ".join(part for part in (one.state, one.reason) if part),
            }
            for one in scores
        ],
    }
