"""What happens in the process where a student's functions run: small cases first, then tests, and a record.

This process belongs to the student's code. What it reports is believed only if it says the word that it was
given, and names every test that it was to run (`checking`).
"""

from __future__ import annotations

import json
import math
import socket
import traceback
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

JOB, RESULT, CASES = "course-job.json", "course-result.json", "tests/test_course_cases.py"
CASES_TEXT = """import json
import pytest
from phases.course.inside import play
@pytest.mark.parametrize("case", json.loads({cases!r}), ids=lambda case: case["id"])
def test_case(case):
    play(case)
"""
LONGEST = 300
JUDGES = {
    "builtins": "abs all any isinstance len list map max min range round set sorted sum type zip",
    "math": "isclose isfinite isnan",
    "pytest": "approx fail raises",
    "numpy": "all allclose any array_equal isclose",
    "numpy.testing": "assert_allclose assert_array_equal assert_equal",
    "torch": "all allclose any eq equal isclose ne Tensor",
    "torch.testing": "assert_close",
    "torch.Tensor": "all allclose any eq equal item isclose max ne sum tolist",
}
"""What tests judge with: whoever changes it judges himself."""


class WrongCase(AssertionError):
    """A worked example came out otherwise."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = expected, got


class NoNetwork(Exception):
    """Somebody tried to speak to another machine."""


def play(case: dict[str, Any]) -> None:
    """Run a `Case`. Raises `WrongCase`, or what the student's function raises."""
    names: dict[str, Any] = {}
    exec(case["setup"], names)
    got, expected = plain(eval(case["call"], names)), plain(eval(case["expect"], names))
    if not same(got, expected):
        raise WrongCase(repr(expected)[:LONGEST], repr(got)[:LONGEST])


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, tuples as lists, numbers rounded to four places."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key) if not isinstance(key, tuple) else key: plain(item) for key, item in value.items()}
    return value


def same(left: Any, right: Any) -> bool:
    """Whether two plain values are equal, floats within 0.0002 and NaN to itself."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    if isinstance(left, float) or isinstance(right, float):
        try:
            return math.isclose(left, right, rel_tol=2e-4, abs_tol=2e-4) or (left != left and right != right)
        except TypeError:
            return False
    return type(left) is type(right) and bool(left == right)


class Recorder:
    """A plugin of pytest that writes down what became of each test, at the very end."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self._job, self._folder = job, folder
        self._tests: dict[str, dict[str, Any]] = {}
        self._network: list[str] = []
        self._judges: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the outcome, and of a failure what was raised and in which line of the student's file."""
        report = yield
        test = self._tests.setdefault(item.nodeid, {"outcome": "passed"})
        if report.skipped:
            test["outcome"] = "skipped"
        elif report.failed:
            error = call.excinfo.value if call.excinfo else None
            test |= {"outcome": "failed", **self._told(error, report)}
        return report

    def _told(self, error: BaseException | None, report: pytest.TestReport) -> dict[str, Any]:
        if isinstance(error, WrongCase):
            return {"expected": error.expected, "got": error.got}
        if error is None:
            return {"message": str(report.longrepr)[-LONGEST:]}
        blank = [line for line in str(error).splitlines() if line.strip()]
        said = "\n".join(blank[:3])[:LONGEST]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        told = {"message": kind + said}
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename) == self._folder / self._job["file"]:
                told["place"] = f"{frame.name}: `{(frame.line or '').strip()}`"
                break
        return told

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported fails as a test."""
        if report.failed:
            self._tests[report.nodeid] = {"outcome": "failed", "message": str(report.longrepr)[-LONGEST:]}

    def pytest_sessionstart(self) -> None:
        """From here on sockets reach this machine only, and nobody changes what tests judge with."""
        self._judges = self._found()
        connect = socket.socket.connect

        def refuse(own: socket.socket, address: Any) -> None:
            near = not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost", "::1")
            if near and own.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
                return connect(own, address)
            self._network.append(str(address))
            raise NoNetwork(f"{address} is another machine")

        socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
        socket.socket.connect_ex = refuse  # type: ignore[method-assign, assignment]

    @staticmethod
    def _found() -> dict[str, Any]:
        """What tests judge with, as it is now."""
        found: dict[str, Any] = {}
        for place, names in JUDGES.items():
            owner = import_module(place.removesuffix(".Tensor"))
            owner = owner.Tensor if place.endswith(".Tensor") else owner
            found |= {f"{place}.{name}": getattr(owner, name, None) for name in names.split()}
        return found

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        found = self._found()
        changed = [name for name, judge in self._judges.items() if found[name] is not judge]
        record = {"tests": self._tests, "network": self._network, "changed": changed}
        text = json.dumps({"word": self._job["word"], **record})
        (self._folder / RESULT).write_text(text, encoding="utf-8")


def plugin() -> Recorder:
    """The plugin, with the job that lies in this folder, which is removed."""
    folder = Path.cwd()
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    (folder / JOB).unlink()
    return Recorder(job, folder)
