"""Whether a student's functions are right: small cases, tests, and tests of later phases."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import libcst as cst

from phases.course.blanks import NotThere, graft, is_blank
from phases.course.exercises import Exercise
from phases.course.guard import refusal
from phases.course.inside import CASES, CASES_TEXT, JOB, RESULT
from phases.course.lessons import trap_of, trap_with
from phases.course.making import text_in
from phases.course.nursery import OUT_OF_TIME, Nursery
from phases.course.overlay import overlay

LIMIT = 60.0
"""Seconds of processor time for an exercise; the tests of every exercise need less."""
WAITING = 4.0
"""Seconds that may pass for each of them: no waiting forever, but other programs may run beside."""
LARGEST = 1 << 26
"""Bytes of a file that it may write, and of what it may print."""
MODULES = ("torch", "hypothesis")
State = Literal["not started", "refused", "fails", "breaks a later phase", "passes here"]


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong: a case, or a test."""

    test: str = ""
    """Its name, or nothing when no test got as far."""
    message: str = ""
    expected: str = ""
    got: str = ""
    call: str = ""
    setup: str = ""
    place: str = ""
    """Where in the student's file something was raised."""
    trap: str = ""
    """The row of the lesson's traps that it resembles."""


@dataclass(frozen=True)
class Verdict:
    """What became of one exercise."""

    exercise: Exercise
    state: State
    failure: Failure | None = None

    @property
    def right(self) -> bool:
        """Whether everything that was run has passed."""
        return self.state == "passes here"


@contextmanager
def room() -> Iterator[Nursery]:
    """The process that forks one for each exercise. Starting it takes as long as importing PyTorch."""
    with Nursery(MODULES, WAITING, LARGEST) as nursery:
        yield nursery


def check(
    exercise: Exercise, source: str, nursery: Nursery, *, hidden: bool = False, limit: float = LIMIT
) -> Verdict:
    """Judge the functions of an exercise in a student's `source`.

    hidden: also run what students do not see.
    """
    reference = exercise.path.read_text(encoding="utf-8")
    try:
        compile(source, exercise.file, "exec")
    except SyntaxError as error:
        return _refused(exercise, f"line {error.lineno}: {error.msg}: `{(error.text or '').strip()}`")
    except (ValueError, RecursionError, MemoryError) as error:
        return _refused(exercise, str(error))
    try:
        if all(is_blank(source, name, exercise.id) for name in exercise.functions):
            return Verdict(exercise, "not started")
        reason = refusal(reference, source, exercise.functions)
        grafted = graft(reference, source, exercise.functions)
        compile(grafted, exercise.file, "exec")
    except cst.ParserSyntaxError as error:
        return _refused(exercise, f"line {error.raw_line} cannot be read")
    except (NotThere, SyntaxError, ValueError, RecursionError) as error:
        return _refused(exercise, str(error).splitlines()[0])
    if reason:
        return _refused(exercise, reason)
    nodes = [*exercise.tests, *(exercise.hidden if hidden else ()), *exercise.later]
    return judged(exercise, run(exercise, grafted, nodes, nursery, limit), nodes)


def _refused(exercise: Exercise, why: str) -> Verdict:
    return Verdict(exercise, "refused", Failure(message=why))


def run(
    exercise: Exercise, text: str, nodes: Sequence[str], nursery: Nursery, limit: float = LIMIT
) -> Mapping[str, Any]:
    """Run cases and tests with this text in the exercise's file.

    Returns `tests` (node id -> outcome and what was said), `network` (addresses that it tried), `changed`
    (what tests judge with and is not as it was), and `ended`, which says why the process did not come to its
    end, if it did not.
    """
    word = secrets.token_hex(16)
    cases = [{"id": str(at), **asdict(case)} for at, case in enumerate(exercise.cases)]
    with overlay({exercise.file: text}) as folder:
        (folder / JOB).write_text(json.dumps({"word": word, "file": exercise.file}), encoding="utf-8")
        (folder / CASES).write_text(CASES_TEXT.format(cases=json.dumps(cases)), encoding="utf-8")
        options = ["-x", "-v", "-p", "no:cacheprovider", "--tb=short", "-m", "not gpu and not weights"]
        first = [CASES] if cases else []
        status, output = nursery.pytest(folder, [*options, *first, *nodes], limit, "phases.course.inside")
        with suppress(OSError, ValueError):
            record = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            if record.pop("word", None) == word:
                return {**record, "ended": "", "output": output}
    running = re.findall(r"^(tests/\S+::[^\s\[]+)", output, re.M)
    at = f" in {running[-1].split('::')[-1]}" if running else ""
    if status == OUT_OF_TIME:
        ended = f"no end after {limit:.0f} s of work{at}: a loop without end?"
    elif status < 0:
        ended = f"signal {-status} ended the process{at}"
    else:
        ended = f"the process ended with status {status}{at}, before its tests did"
    return {"tests": {}, "network": [], "changed": [], "ended": ended, "output": output}


def judged(exercise: Exercise, record: Mapping[str, Any], nodes: Iterable[str]) -> Verdict:
    """The verdict that follows from a record."""
    if record["network"]:
        return _refused(exercise, f"it tried to reach {record['network'][0]}")
    if record["changed"]:
        return _refused(exercise, f"it changed {record['changed'][0]}, which tests judge with")
    if record["ended"]:
        return Verdict(exercise, "fails", Failure(message=record["ended"]))
    tests: dict[str, dict[str, str]] = record["tests"]
    for node, told in tests.items():
        if told["outcome"] == "failed":
            return _failed(exercise, node, told)
    for node in nodes:
        if not any(name == node or name.startswith(node + "[") for name in tests):
            return Verdict(exercise, "fails", Failure(message=f"{node} was not run"))
    return Verdict(exercise, "passes here")


def _failed(exercise: Exercise, node: str, told: Mapping[str, str]) -> Verdict:
    test = node.split("::")[-1]
    if node.startswith(CASES):
        case = exercise.cases[int(test.partition("[")[2].rstrip("]"))]
        known = {key: told.get(key, "") for key in ("message", "expected", "got", "place")}
        # What raises instead of answering resembles no wrong answer.
        trap = trap_with(exercise.phase, case.trap) if case.trap and known["got"] else ""
        expected = known.pop("expected") or case.expect
        return Verdict(
            exercise,
            "fails",
            Failure("", call=case.call, setup=case.setup, expected=expected, trap=trap, **known),
        )
    base = node.partition("[")[0]
    here = any(base.startswith(own.partition("[")[0]) for own in (*exercise.tests, *exercise.hidden))
    failure = Failure(
        test, told.get("message", ""), place=told.get("place", ""), trap=trap_of(exercise.phase, test)
    )
    return Verdict(exercise, "fails" if here else "breaks a later phase", failure)


def read(folder: Path, exercise: Exercise) -> str:
    """A student's file. Raises `NotThere` when it is none that may be read."""
    try:
        return text_in(folder, exercise.file)
    except FileNotFoundError as error:
        raise NotThere(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotThere(f"{exercise.file} cannot be read: {error}") from None


def check_file(folder: Path, exercise: Exercise, nursery: Nursery, *, hidden: bool = False) -> Verdict:
    """`check` for what lies in a student's copy."""
    try:
        source = read(folder, exercise)
    except NotThere as error:
        return _refused(exercise, str(error))
    return check(exercise, source, nursery, hidden=hidden)
