"""Plant a bug in a copy of the checkout and see whether the phase's own tests notice.

Tests are trusted because they can fail. Here that is tried out: each `Bug` is a mistake that somebody who
writes the phase for the first time would make, and the phase's tests have to die of it.
"""

from __future__ import annotations

import importlib
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phases.course.nursery import OUT_OF_TIME, Nursery
from phases.course.overlay import copy_reference

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0
"""Seconds of work that the tests may take under a planted bug before they count as hanging."""

Verdict = Literal["killed", "survived", "timed out", "does not apply", "does not import"]


class DoesNotApply(Exception):
    """The code has changed, so that the bug has to change with it."""


@dataclass(frozen=True)
class Bug:
    """One mistake, as an edit of one file.

    name: short and unique within its phase.
    file: relative to the checkout.
    old, new: the text replaced, which must occur exactly once, and what replaces it.
    mistake: one sentence on what the learner got wrong.
    unseen: why no test can see it; empty for a bug that must die.
    """

    name: str
    file: str
    old: str
    new: str
    mistake: str
    unseen: str = ""

    def plant(self, root: Path) -> str:
        """The file's text with the bug in it. Raises `DoesNotApply`."""
        text = (root / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise DoesNotApply(f"{self.name}: the old text occurs {found} times in {self.file}, not once")
        planted = text.replace(self.old, self.new)
        try:
            compile(planted, self.file, "exec")
        except SyntaxError as error:
            raise DoesNotApply(f"{self.name}: {self.file} does not compile: {error}") from None
        return planted


@dataclass(frozen=True)
class Outcome:
    """What the tests made of one bug: by which test it was killed, and the first line of what that said."""

    verdict: Verdict
    test: str = ""
    message: str = ""
    seconds: float = 0.0


def phases() -> list[str]:
    """The phases that have planted bugs, as two digits."""
    return sorted(path.stem.removeprefix("bugs_") for path in Path(__file__).parent.glob("bugs_*.py"))


def bugs_of(phase: str) -> Sequence[Bug]:
    """The planted bugs of a phase (two digits)."""
    bugs: Sequence[Bug] = importlib.import_module(f"tests.planted.bugs_{phase}").BUGS
    return bugs


def own_tests(phase: str) -> list[str]:
    """Return the phase's own tests."""
    found = sorted((ROOT / "tests" / "phases").glob(f"test_{phase}_*.py"), key=lambda path: path.name)
    return [str(path.relative_to(ROOT)) for path in found]


def try_out(nursery: Nursery, phase: str, bug: Bug | None = None, limit: float = LIMIT) -> Outcome:
    """Run the phase's tests with the bug planted, or without any, in a copy that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        copy_reference(copy)
        if bug is not None:
            try:
                (copy / bug.file).write_text(bug.plant(copy), encoding="utf-8")
            except DoesNotApply as error:
                return Outcome("does not apply", message=str(error))
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not gpu and not weights"]
        started = time.perf_counter()
        status, output = nursery.pytest(copy, arguments + own_tests(phase), limit)
        seconds = time.perf_counter() - started
    if status == OUT_OF_TIME:
        return Outcome("timed out", message=f"no end after {limit:.0f} s", seconds=seconds)
    if status == 0:
        return Outcome("survived", seconds=seconds)
    failure = re.search(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.*)$", output, re.M)
    if failure is None:
        return Outcome("does not import", message=output.strip()[-2000:], seconds=seconds)
    return Outcome("killed", failure[1], failure[2].removeprefix("AssertionError: "), seconds)
