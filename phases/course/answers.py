"""Answers to predict and to measure, compared with the evidence that was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from phases import ROOT
from phases.course.exercises import Question
from phases.course.making import ANSWERS, parsed, text_in

RESULTS = ROOT / "benchmarks" / "results"


def truth(question: Question) -> float:
    """Return the evidence's value. Raises `UserError` when it has no such run."""
    value = _metric(question, question.run)
    return value / _metric(question, question.over) if question.over else value


def _metric(question: Question, wanted: Mapping[str, Any]) -> float:
    path = RESULTS / wanted.get("evidence", question.evidence)
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"question {question.id} needs {path}, which cannot be read") from None
    metric = wanted.get("metric", question.metric)
    asked = {key: value for key, value in wanted.items() if key not in ("metric", "evidence")}
    for run in runs:
        found = {**run["options"], **run}
        if all(found.get(key) == value for key, value in asked.items()) and metric in run["metrics"]:
            return float(run["metrics"][metric]["median"])
    raise UserError(f"question {question.id} needs a run of {path.name} that is not there: {dict(wanted)}")


def is_right(question: Question, answer: float) -> bool:
    """Return True if an answer is within the question's tolerance of the evidence."""
    known = truth(question)
    return abs(answer - known) <= question.tolerance * abs(known)


def given(folder: Path) -> dict[str, float]:
    """The answers noted in a working copy."""
    try:
        noted = parsed(text_in(folder, ANSWERS))
        return {str(name): float(value) for name, value in noted.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}


def note(folder: Path, question: Question, answer: float) -> None:
    """Write an answer down, in place of an earlier one."""
    answers = {**given(folder), question.id: answer}
    (folder / ANSWERS).write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
