"""Run a student's functions, and write a record: worked cases in one process, tests in another.

The student's code runs in this process and could change it, so the parent process judges (`checking`). The
record has only the value of each case, and the outcome of each test, also of canaries: tests that must fail.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

LONGEST, SHOWN = 600, 8
"""Characters, and lines of a note."""


def main(job: dict[str, Any], record_file: int) -> int:
    """Run pytest with a job's `arguments`, or the job's worked `cases` if it has no arguments.

    job: also has the student's `file`, and a `word` that is copied to the record. record_file: number of an
        open file (descriptor), which gets the outcomes as JSON.

    Returns:
        The exit status: pytest's, or 0.
    """
    file = Path.cwd() / job["file"]
    record: dict[str, Any] = {"word": job["word"], "tests": {}}
    if job["arguments"]:
        import pytest  # the command, which needs some names of this file, has no need of it

        return int(
            pytest.main(job["arguments"], plugins=[Recorder(record, file, record_file)])
        )
    record["cases"] = [value_of(case, file) for case in job["cases"]]
    os.write(record_file, json.dumps(record).encode())
    return 0


def value_of(case: dict[str, str], file: Path) -> dict[str, str]:
    """Run a worked case (`setup`, then `call`), and return what came of it, as a dictionary of texts.

    Returns:
        `got`: the value as text; or what was raised: `kind`, `message`, and `place` in the student's `file`.
        `printed`: the beginning of what the case wrote to standard output, which must be a file.
    """
    names: dict[str, Any] = {}
    begin = os.lseek(1, 0, os.SEEK_CUR)
    try:
        exec(case["setup"], names)
        said = {"got": repr(plain(eval(case["call"], names)))}
    except BaseException as error:  # pytest's `Skipped` and the like are none of `Exception`
        said = raised(error, file)
    with suppress(OSError):  # the file may be full
        sys.stdout.flush()
    return {**said, "printed": os.pread(1, LONGEST, begin).decode(errors="replace")}


def plain(value: Any) -> Any:
    """Return a value with tensors, arrays and tuples as lists, and floats rounded to four decimals.

    Lists and dictionaries are converted inside as well; other values stay.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {
            plain(key) if not isinstance(key, tuple) else key: plain(item)
            for key, item in value.items()
        }
    return value


def raised(error: BaseException, file: Path) -> dict[str, str]:
    """Return an error as a dictionary of texts: `kind`, `message`, and `place`.

    place: the last line in the student's `file` through which it went; left out if there is none.
    """
    # Hypothesis has found several: the first is to begin with.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = [*filter(str.strip, str(error).splitlines())][:3]
    # Hypothesis' falsifying example.
    notes = "\n".join(getattr(error, "__notes__", ()))
    lines += [*filter(str.strip, notes.splitlines())][:SHOWN]
    said = "\n".join(lines)[:LONGEST]
    kind = type(error).__name__
    found = {"kind": kind, "message": said if kind == "AssertionError" else f"{kind}: {said}"}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename) == file:
            return {**found, "place": f"{frame.name}: `{(frame.line or '').strip()}`"}
    return found


@dataclass(eq=False)
class Recorder:
    """A pytest plugin that records each test's outcome, and writes the record as JSON when the session ends.

    record: dictionary to fill. file: the student's, for the place of errors. record_file: descriptor of an
        open file.
    """

    record: dict[str, Any]
    file: Path
    record_file: int
    _raised: dict[str, dict[str, str]] = field(default_factory=dict)

    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> None:
        """Remember the exception of a test that raised one, for its report."""
        if call.excinfo is not None:
            self._raised[item.nodeid] = raised(call.excinfo.value, self.file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's outcome (passed, failed, skipped, xfailed), with the exception of a failed test."""
        if report.failed:
            self._record_failure(report)
        elif report.skipped or report.when == "call":
            outcome = "xfailed" if "wasxfail" in vars(report) else report.outcome
            self.record["tests"][report.nodeid] = {"outcome": outcome}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as a failed test."""
        if report.failed:
            self._record_failure(report)

    def _record_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        said = {"outcome": "failed", "message": str(report.longrepr)[-LONGEST:]}
        self.record["tests"][report.nodeid] = said | self._raised.get(report.nodeid, {})

    def pytest_sessionfinish(self) -> None:
        """Write the record of all tests, as JSON, to the open file `record_file`."""
        os.write(self.record_file, json.dumps(self.record).encode())
