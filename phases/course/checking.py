"""Check a student's functions by worked cases, by tests of their phase, and by tests of later phases."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from common.error_lines import visible
from phases import ROOT
from phases.course.blanks import NotThere, blank, graft, is_blank
from phases.course.exercises import Case, Exercise, files_of
from phases.course.fork_server import OUT_OF_TIME, RESULT, ForkServer
from phases.course.grading_process import LONGEST, plain
from phases.course.lessons import trap_of, trap_with
from phases.course.making import text_in
from phases.course.sandbox import PROCESSES, TOO_MANY_PROCESSES

LIMIT = 60.0
"""Seconds of processor time for an exercise's tests; those of every exercise need less."""
CASES_LIMIT = 5.0
"""As `LIMIT`, for an exercise's worked cases, of which the slowest need half a second."""
OPTIONS = ["-x", "-v", "-p", "no:cacheprovider", "--tb=short", "-m", "not gpu and not weights"]
# The plugins that tests need: others that are installed take longer to import than most tests.
OPTIONS += ["-p", "timeout", "-p", "hypothesispytest"]
FOUND = "with it a test passes that must fail: it changed what tests judge with"
CANARIES = 9
COPIED = ("common", "phases", "tests", "benchmarks")
"""The folders that tests read."""
State = Literal["not started", "refused", "fails", "breaks a later phase", "passes here"]


@dataclass(frozen=True)
class Failure:
    """The first worked case (example call) or test of an exercise that failed.

    Fields that do not apply are "".
    """

    test: str = ""
    """Its name, with the later phase whose test it is, or nothing when no test got as far."""
    message: str = ""
    expected: str = ""
    got: str = ""
    call: str = ""
    setup: str = ""
    place: str = ""
    """Where in the student's file something was raised."""
    trap: str = ""
    """The row of the lesson's traps that it resembles."""
    printed: str = ""
    """The beginning of what the case has printed."""

    def __post_init__(self) -> None:
        """Make each field's control characters visible, since the text comes from a student's process."""
        for name, text in vars(self).items():
            object.__setattr__(self, name, visible(text))


@dataclass(frozen=True)
class Verdict:
    """The result of checking a student's exercise: a state such as "fails", and the first failure or None."""

    exercise: Exercise
    state: State
    failure: Failure | None = None

    @property
    def right(self) -> bool:
        """Return True if every case and test that was run has passed."""
        return self.state == "passes here"


def check(
    exercise: Exercise, source: str, server: ForkServer, *, hidden: bool = False
) -> Verdict:
    """Return the verdict on a student's functions of an exercise, by cases and tests in a sandboxed process.

    source: text of the student's file. server: runs the tests. hidden: also run tests that working copies do
        not show.
    """
    reference = exercise.path.read_text(encoding="utf-8")
    try:
        compile(source, exercise.file, "exec")
        if all(is_blank(source, name, exercise.id) for name in exercise.functions):
            return Verdict(exercise, "not started")
        grafted = graft(reference, source, exercise.functions)
        compile(grafted, exercise.file, "exec")
    except SyntaxError as error:
        return _refused(
            exercise, f"line {error.lineno}: {error.msg}: `{(error.text or '').strip()}`"
        )
    except (NotThere, ValueError, RecursionError, MemoryError) as error:
        return _refused(exercise, str(error).partition("\n")[0])
    nodes = [*exercise.tests, *(exercise.hidden if hidden else ()), *exercise.later]
    return run(exercise, grafted, nodes, server)


def _refused(exercise: Exercise, why: str) -> Verdict:
    return Verdict(exercise, "refused", Failure(message=why))


def run(
    exercise: Exercise,
    text: str,
    nodes: Sequence[str],
    server: ForkServer,
    limit: float = LIMIT,
) -> Verdict:
    """Return the verdict on an exercise with `text` as its file, by worked cases, then by tests.

    Each of the two runs in a process of its own, in a fresh copy of the checkout.
    nodes: pytest ids of the tests. server: runs them. limit: seconds of processor time for the tests.
    """
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_reference(folder)
        if exercise.cases:
            # What could do the work in the student's place is blank there: only tests need it.
            blanks = files_of([exercise])[exercise.file]
            held = {name: "" for name, given in blanks.items() if not given}
            (folder / exercise.file).write_text(blank(text, held), encoding="utf-8")
            record = _record(folder, exercise, [], server, CASES_LIMIT)
            if failed := _of_run(exercise, record):
                return failed
            for case, said in zip_longest(
                exercise.cases, record["cases"][: len(exercise.cases)]
            ):
                if failed := _of_case(exercise, case, said):
                    return failed
        (folder / exercise.file).write_text(text, encoding="utf-8")
        canary = f"tests/phases/test_{secrets.token_hex(8)}.py"
        shutil.copy2(ROOT / "tests" / "course" / "canaries.py", folder / canary)
        record = _record(folder, exercise, [*nodes, canary], server, limit)
        if failed := _of_run(exercise, record, nodes):
            return failed
        tests = record["tests"]
        canaries = [tests.pop(node) for node in list(tests) if node.startswith(canary)]
        if canaries != [{"outcome": "xfailed"}] * CANARIES:
            return _refused(exercise, FOUND)
        left = {node: said for node, said in tests.items() if said["outcome"] != "passed"}
        # A machine may lack what a test needs, but then the reference leaves it as well.
        if left:
            reference = exercise.path.read_text(encoding="utf-8")
            (folder / exercise.file).write_text(reference, encoding="utf-8")
            own = _record(folder, exercise, list(left), server, limit)["tests"]
            for node, said in left.items():
                if own.get(node) != said:
                    why = f"{node.split('::')[-1]} is {said['outcome']} with it"
                    return _refused(exercise, f"{why}, and passes with the reference")
    return Verdict(exercise, "passes here")


def copy_reference(folder: Path) -> None:
    """Copy all files that tests read to `folder`, without bytecode, expected values, planted mistakes."""
    left_out = shutil.ignore_patterns("__pycache__", "exercises.toml", "patches")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    shutil.copy2(ROOT / "pyproject.toml", folder)


def _record(
    folder: Path, exercise: Exercise, nodes: list[str], server: ForkServer, limit: float
) -> dict[str, Any]:
    """Run tests, or the exercise's worked cases if `nodes` is empty, in a process of its own.

    folder: copy of the checkout. nodes: pytest ids. limit: seconds of processor time.

    Returns:
        A dictionary: `tests` (node id -> outcome, message and place), `cases` (a value or a message for
        each), and `ended`, the reason why the process did not finish, or "".
    """
    word = secrets.token_hex(16)
    arguments = [*OPTIONS, f"--hypothesis-seed={server.seed}", *nodes] if nodes else []
    cases = [{"setup": case.setup, "call": case.call} for case in exercise.cases]
    job = {"word": word, "file": exercise.file, "cases": cases, "arguments": arguments}
    (folder / RESULT).unlink(missing_ok=True)
    status, output = server.run(folder, job, limit)
    empty = {"tests": {}, "cases": [], "ended": ""}
    with suppress(OSError, ValueError, AttributeError):
        record = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if record.pop("word", None) == word:
            return {**empty, **record}
    running = re.findall(r"^(tests/\S+::[^\s\[]+)", output, re.M) if nodes else ["a case"]
    at = f" in {running[-1].split('::')[-1]}" if running else ""
    if status == OUT_OF_TIME:
        ended = f"no end after {limit:.0f} s of work{at}: a loop without end?"
    elif status == TOO_MANY_PROCESSES:
        ended = f"more than {PROCESSES} processes{at}: all were ended"
    elif status < 0:
        ended = f"signal {-status} ended the process{at}"
    else:
        ended = f"the process ended with status {status}{at}, before its tests did"
    return {**empty, "ended": ended}


def _of_case(exercise: Exercise, case: Case, said: Mapping[str, str] | None) -> Verdict | None:
    """Return the verdict on a worked case whose value is not the expected one; None if the value is right.

    said: the value as text (`got`), or what was raised (`message`, `place`); None: the case was not run.
    The expected value is computed here: the process that ran the case does not know it.
    """
    said = said or {"message": "it was not run"}
    got, expected = said.get("got", ""), plain(ast.literal_eval(case.expect.strip()))
    is_same_type = False
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(got)
        if same(value, expected):
            return None
        is_same_type = type(value) is type(expected)
    # What raises, or is of another kind, resembles no wrong answer.
    trap = trap_with(exercise.phase, case.trap) if case.trap and is_same_type else ""
    failure = Failure(
        message=said.get("message", ""),
        expected=repr(expected)[:LONGEST],
        got=got[:LONGEST],
        call=case.call,
        setup=case.setup,
        place=said.get("place", ""),
        trap=trap,
        printed=said.get("printed", ""),
    )
    return Verdict(exercise, "fails", failure)


def same(left: Any, right: Any) -> bool:
    """Return True if two values of lists, dictionaries, numbers and texts are equal.

    Floats may differ by 0.0002, or by that part of the larger one.
    """
    kinds = {type(left), type(right)}
    if kinds == {list}:
        return len(left) == len(right) and all(map(same, left, right))
    if kinds == {dict}:
        return left.keys() == right.keys() and all(
            same(left[key], right[key]) for key in right
        )
    if kinds in ({float}, {float, int}):
        return math.isclose(left, right, rel_tol=2e-4, abs_tol=2e-4)
    return len(kinds) == 1 and bool(left == right)


def _of_run(
    exercise: Exercise, record: Mapping[str, Any], nodes: Iterable[str] = ()
) -> Verdict | None:
    """Return the verdict on a run of cases or tests that went wrong; None if nothing did.

    Wrong is: a test failed, one of `nodes` (pytest ids) was not run, or the process did not finish.
    record: what `_record` returned.
    """
    tests = record["tests"]
    for node, report in tests.items():
        if report["outcome"] == "failed":
            return _failed(exercise, node, report)
    ran = {part for name in tests for part in (name, name.partition("[")[0])}
    missing = [f"{node} was not run" for node in nodes if node not in ran]
    if record["ended"] or missing:
        return Verdict(exercise, "fails", Failure(message=record["ended"] or missing[0]))
    return None


def _failed(exercise: Exercise, node: str, report: Mapping[str, str]) -> Verdict:
    message, place = report.get("message", ""), report.get("place", "")
    if "XPASS" in message:
        return _refused(exercise, FOUND)
    test = node.split("::")[-1]
    own = tuple(name.partition("[")[0] for name in (*exercise.tests, *exercise.hidden))
    if not node.startswith(own):
        test += f" of phase {Path(node.partition('::')[0]).stem.removeprefix('test_')}"
        return Verdict(exercise, "breaks a later phase", Failure(test, message, place=place))
    trap = trap_of(exercise.phase, test) if report.get("kind") == "AssertionError" else ""
    return Verdict(exercise, "fails", Failure(test, message, place=place, trap=trap))


def check_file(
    folder: Path, exercise: Exercise, server: ForkServer, *, hidden: bool = False
) -> Verdict:
    """Return the verdict on an exercise's file in a student's working copy.

    folder: the copy. server: runs the tests. hidden: also run tests that working copies do not show.
    A file that cannot be read has the state "refused".
    """
    try:
        source = text_in(folder, exercise.file)
    except (OSError, UnicodeDecodeError) as error:
        return _refused(exercise, f"{exercise.file} cannot be read: {error}")
    return check(exercise, source, server, hidden=hidden)
