"""Try mutants: one at a time in a copy of the checkout, until a test of its own fails."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phases import PHASES, ROOT
from phases.course.checking import copy_reference
from tests.mutants.making import Mutant

MORE = 20.0
"""Seconds of processor time that tests may take beyond what they take without a mutant."""


KINDS = "not gpu and not weights and not long"
"""The tests that are tried."""


@dataclass(frozen=True)
class Target:
    """What mutants are made of, and the tests that are to notice."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


def target(name: str) -> Target:
    """A phase by its two digits, an entry of the appendix by its name, or `common`. Raises `LookupError`."""
    if name == "common":
        folder, tests = ROOT / "common", [ROOT / "tests/common"]
    else:
        phase = next((one for one in PHASES if f"{one.number:02d}" == name), None)
        entry = ROOT / "phases" / "appendix" / name
        if phase is None and not (entry / "__init__.py").is_file():
            raise LookupError(f"there is no phase and no entry {name}")
        folder = phase.folder / phase.package if phase else entry
        pattern = f"phases/test_{name}_*.py" if phase else f"appendix/test_{name}*.py"
        tests = list((ROOT / "tests").glob(pattern))
    files, found = (
        tuple(sorted(str(p.relative_to(ROOT)) for p in some))
        for some in (folder.rglob("*.py"), tests)
    )
    if not found:
        raise LookupError(f"{name} has no tests of its own")
    return Target(name, files, found)


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: the test that failed first, and the seconds of processor time until then."""

    verdict: Literal["killed", "survived", "timed out"]
    test: str = ""
    seconds: float = 0.0


class Bench:
    """A copy of the checkout in which the tests of one target run with one mutant after another."""

    def __init__(self, copy: Path, aim: Target) -> None:
        self.copy = copy
        self.target = aim
        self.limit = 1200.0
        control = self._run()
        if control.verdict != "survived":
            raise RuntimeError(
                f"{control.test or 'a test'} of {aim.name} fails without any mutant"
            )
        self.control, self.limit = control.seconds, control.seconds + MORE

    def try_out(self, mutant: Mutant) -> Outcome:
        """Run the tests with the mutant in the copy."""
        path = self.copy / mutant.file
        before = path.read_bytes()
        path.write_bytes(mutant.plant(self.copy))
        try:
            return self._run()
        finally:
            path.write_bytes(before)

    def _run(self) -> Outcome:
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", KINDS]
        places = [self.copy, *sorted((self.copy / "phases").glob("[0-9]*"))]
        more = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
        before = _processor_seconds()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *quiet, *self.target.tests],
                cwd=self.copy,
                env=os.environ | more | {"PYTHONPATH": os.pathsep.join(map(str, places))},
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_CPU, (int(self.limit),) * 2
                ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=8 * self.limit,
            )
        except subprocess.TimeoutExpired:
            return Outcome("timed out")
        seconds = _processor_seconds() - before
        if done.returncode < 0:
            return Outcome("timed out", seconds=seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (?:\S+?::)?(.+?)(?: - .*)?$", done.stdout, re.M)
        return Outcome(
            "killed" if done.returncode else "survived", failed[1] if failed else "", seconds
        )


def _processor_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def bench(aim: Target) -> Iterator[Bench]:
    """Copy the checkout for the time of a `with`. Raises `RuntimeError` where tests fail without mutants."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_reference(Path(folder))
        yield Bench(Path(folder), aim)
