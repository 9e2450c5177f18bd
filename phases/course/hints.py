"""Hints of three levels, the solution as a diff, and the log of students who asked for them."""

from __future__ import annotations

import json
import textwrap
import time
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path

from common.errors import UserError
from phases.course.blanks import Function, functions, lines_of
from phases.course.exercises import Exercise
from phases.course.making import text_in

LOG = "course-log.jsonl"
LEVELS = 3


def hint(exercise: Exercise, level: int) -> str:
    """Return the text of an exercise's hint.

    level: 1: what must hold, and where the lesson says it; 2: a worked input and output; 3: pseudocode.

    Raises:
        UserError: there is no such level.
    """
    if level == 1:
        return f"{exercise.invariant}\n\nRead the lesson's paragraph that begins: {exercise.paragraph}"
    if level == 2:
        return exercise.example.strip() or "\n\n".join(
            f"{case.setup.strip()}\n{case.call.strip()}\n-> {case.expect.strip()}".lstrip()
            for case in exercise.cases
        )
    if level == LEVELS:
        return exercise.pseudocode.strip()
    raise UserError(f"--level is {level}, but it must be 1, 2 or 3")


def solution(exercise: Exercise, source: str) -> str:
    """Return a unified diff from a student's functions to the reference's; a missing function counts as
    empty.

    source: text of the student's file.
    """
    reference = exercise.path.read_text(encoding="utf-8")
    ours = functions(reference)
    try:
        theirs = functions(source)
    except SyntaxError:  # a student who is stuck there may look all the same
        theirs = {}
    parts: list[str] = []
    for name in exercise.functions:
        before = _lines(source, theirs[name]) if name in theirs else []
        after = _lines(reference, ours[name])
        parts += unified_diff(
            before, after, f"yours: {name}", f"reference: {name}", n=20, lineterm=""
        )
    return "\n".join(parts)


def _lines(source: str, node: Function) -> list[str]:
    return textwrap.dedent("\n".join(lines_of(source, node))).split("\n")


def log(folder: Path, what: str, exercise: str, **more: object) -> None:
    """Append a line of JSON, with the time, to the log of a working copy.

    folder: the copy. what: "hint", "solution" or "answer". exercise: id of the exercise or question.
    more: further fields of the line.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"when": when, "what": what, "exercise": exercise, **more}) + "\n"
        )


def logged(folder: Path, exercise: str, what: str) -> list[dict[str, object]]:
    """Return the entries in a working copy's log about one exercise or question, oldest first; none: `[]`.

    folder: the copy. exercise: its id. what: "hint", "solution" or "answer".
    """
    found = []
    with suppress(OSError):
        for line in text_in(folder, LOG, errors="replace").splitlines():
            # A line of nonsense, however deep, does not hide the others.
            with suppress(ValueError, AttributeError, RecursionError):
                one = json.loads(line)
                if (one.get("exercise"), one.get("what")) == (exercise, what):
                    found.append(one)
    return found
