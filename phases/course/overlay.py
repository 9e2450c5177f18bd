"""A fresh copy of the reference with a student's functions in it: nothing else of theirs is taken."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from phases import ROOT

COPIED = ("common", "phases", "tests", "benchmarks", "pyproject.toml")
"""What tests read."""


def copy_reference(folder: Path) -> None:
    """Everything that tests read, without bytecode."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def overlay(files: Mapping[str, str]) -> Iterator[Path]:
    """A copy in which these files have these texts; it is gone at the end of the `with`."""
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_reference(folder)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        yield folder
