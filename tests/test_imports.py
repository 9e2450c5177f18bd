"""Imports point one way: a phase imports from phases below it and from common, common from no phase."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases import PHASES, ROOT

NUMBERS = {phase.package: phase.number for phase in PHASES}
ABOVE_ALL = 99
"""The commands and the benchmarks stand above every phase: no phase's package may import them."""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def wrong_imports(folder: Path, number: int) -> list[str]:
    """The imports in `folder` that reach above `number`."""
    levels = NUMBERS | {"phases": ABOVE_ALL, "benchmarks": ABOVE_ALL, "tests": ABOVE_ALL}
    return [
        f"{path.relative_to(folder.parent)}:{line} imports {package}"
        for path in sorted(folder.rglob("*.py"))
        for line, package in imported(path)
        if levels.get(package, 0) > number and path.name != "__main__.py"
    ]


def test_common_imports_no_phase():
    assert wrong_imports(ROOT / "common", 0) == []


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_imports_only_from_below(phase):
    assert wrong_imports(phase.folder / phase.package, phase.number) == []


def test_commands_import_benchmarks_and_never_the_other_way():
    found = [
        f"{path.relative_to(ROOT)} imports phases.commands"
        for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "phases").glob("*/bench.py")]
        if "phases.commands" in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_every_phase_folder_is_known():
    folders = {path.name for path in (ROOT / "phases").glob("[0-9]*") if any(path.glob("*/__init__.py"))}
    assert folders == {phase.name for phase in PHASES}
