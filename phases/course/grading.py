"""Scores of a student's working copy: all tests run on its functions in a fresh copy of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence import RESULTS, Evidence
from common.errors import UserError
from phases import ROOT
from phases.course.checking import State, Verdict, check_file
from phases.course.exercises import Exercise, Question
from phases.course.fork_server import ForkServer
from phases.course.hints import LOG, logged
from phases.course.making import Copy, about, fingerprint, made_files, opened

EARNED: dict[State, float] = {"passes here": 1.0, "breaks a later phase": 0.5}
"""The part of the points; nothing in other states."""


@dataclass(frozen=True)
class Score:
    """The points of an exercise or a question, and the reason if some are missing."""

    id: str
    title: str
    points: float
    most: int
    state: str
    reason: str = ""
    hints: int = 0
    solution_shown: bool = False
    guesses: int = 0
    """Number of replies that were given to a question; the last one counts."""


def grade(
    folder: Path, server: ForkServer, *, asked: Sequence[Exercise] = (), key: bool = False
) -> list[Score]:
    """Return the scores of a student's working copy, exercises first, then questions.

    server: runs the tests. key: for a teacher: the reason of a wrong reply contains the right number.
    asked: exercises that the class had to do; those that the copy lacks earn nothing. Empty: all exercises of
        the copy.

    Raises:
        UserError: the folder is no working copy, or was made from another version of the course.
    """
    copy = opened(folder)
    if fingerprint(made_files(copy.exercises)) != copy.made_from:
        raise UserError(
            f"{folder} was made from another version of the course than this checkout, {ROOT}. "
            "Check out the commit that it was made from, and grade again. Or make a new copy "
            f"(`ladder course make`), put your files with functions and {LOG} into it, and grade that"
        )
    scores = [
        score(copy, exercise, server)
        if exercise in copy.exercises
        else Score(exercise.id, exercise.title, 0, exercise.points, "not in this copy")
        for exercise in asked or copy.exercises
    ]
    for question in about(asked or copy.exercises)[1]:
        guesses = logged(folder, question.id, "answer")
        answer, reason = given(guesses), ""
        right = answer is not None and is_right(question, answer)
        state = "not started" if answer is None else "passes" if right else "fails"
        if state == "fails":
            reason = f"{answer:g} is not within {question.tolerance:.0%} of the evidence"
            reason += f" ({truth(question):.3g})" if key else ""
        scores.append(
            Score(
                question.id,
                question.question,
                question.points * right,
                question.points,
                state,
                reason,
                guesses=len(guesses),
            )
        )
    return scores


def score(copy: Copy, exercise: Exercise, server: ForkServer) -> Score:
    """Check an exercise of a working copy, hidden tests included, and return its score.

    server: runs the tests.
    """
    hints = logged(copy.folder, exercise.id, "hint")
    shown = logged(copy.folder, exercise.id, "solution")
    verdict = check_file(copy.folder, exercise, server, hidden=True)
    return Score(
        exercise.id,
        exercise.title,
        exercise.points * EARNED.get(verdict.state, 0.0),
        exercise.points,
        verdict.state,
        reason_of(verdict),
        len({str(one.get("level")) for one in hints}),
        bool(shown),
    )


def reason_of(verdict: Verdict) -> str:
    """Return one line about the first failure in the check of an exercise; "" if nothing failed."""
    failure = verdict.failure
    if failure is None:
        return ""
    said = failure.message or f"{failure.call}: expected {failure.expected}, got {failure.got}"
    return f"{failure.test}: {said}" if failure.test else said


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """Return {"points": their sum, "of": the most that can be reached, "exercises": all scores}."""
    total, most = sum(one.points for one in scores), sum(one.most for one in scores)
    return {"points": total, "of": most, "exercises": [vars(one) for one in scores]}


def as_gradescope(scores: Sequence[Score]) -> dict[str, Any]:
    """Return scores as the data of Gradescope's results.json: the sum, and points and reason of each."""
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


# Answers to predict and to measure, compared with the evidence that was recorded.


def truth(question: Question) -> float:
    """Return the number that a question asks for, from its evidence file.

    Raises:
        UserError: the file has no such run.
    """
    return _metric(question, question.run) / _metric(question, question.over)


def _metric(question: Question, wanted: Mapping[str, Any]) -> float:
    facts = {"evidence": question.evidence, "metric": question.metric, **wanted}
    evidence, metric = Evidence.load(RESULTS / facts.pop("evidence")), facts.pop("metric")
    found = [run.median(metric) for run in evidence.find(**facts) if metric in run.metrics]
    if not found:
        raise UserError(
            f"question {question.id} needs a run of {evidence.phase} that is not there: {facts}"
        )
    return found[0]


def is_right(question: Question, answer: float) -> bool:
    """Return True if `answer` is within the question's tolerance of the evidence's value."""
    known = truth(question)
    return abs(answer - known) <= question.tolerance * abs(known)


def given(guesses: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the number of the last reply in a question's log entries; None if there is no valid one."""
    with suppress(IndexError, KeyError, TypeError, ValueError, OverflowError):
        return float(guesses[-1]["answer"])
    return None
