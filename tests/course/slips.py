"""Mistakes in the functions of exercises: those planted in the phases' tests, and more."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phases.course.exercises import Exercise
from tests.planted.planting import ROOT, Bug, DoesNotApply, bugs_of


@dataclass(frozen=True)
class Slip:
    """One mistake: what it replaces occurs once in the exercise's functions."""

    name: str
    old: str
    new: str
    mistake: str

    def plant(self, exercise: Exercise) -> str:
        """The text of the exercise's file with the mistake in it. Raises `DoesNotApply`."""
        text = (ROOT / exercise.file).read_text(encoding="utf-8")
        lines, found = text.splitlines(keepends=True), []
        for first, last in spans(text, exercise.functions):
            part = "".join(lines[first - 1 : last])
            if part.count(self.old) == 1:
                new = part.replace(self.old, self.new)
                found.append("".join([*lines[: first - 1], new, *lines[last:]]))
            elif self.old in part:
                found += ["", ""]
        if len(found) != 1:
            raise DoesNotApply(f"{exercise.id} {self.name}: the old text occurs {len(found)} times, not once")
        return _compiled(found[0], f"{exercise.id} {self.name}")


@dataclass(frozen=True)
class Planted:
    """One of the bugs that are planted in a phase's own tests."""

    bug: Bug

    @property
    def name(self) -> str:
        """The bug's."""
        return self.bug.name

    @property
    def mistake(self) -> str:
        """The bug's."""
        return self.bug.mistake

    def plant(self, exercise: Exercise) -> str:
        """The text of the exercise's file with the mistake in it. Raises `DoesNotApply`."""
        if self.bug.file != exercise.file:
            raise DoesNotApply(f"{exercise.id} {self.name}: it is in {self.bug.file}, not in {exercise.file}")
        return self.bug.plant(ROOT)


def _compiled(text: str, name: str) -> str:
    try:
        compile(text, name, "exec")
    except SyntaxError as error:
        raise DoesNotApply(f"{name} does not compile: {error}") from None
    return text


def spans(text: str, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and last line of functions, by qualified name."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, int]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and prefix + node.name in names:
                yield node.lineno, node.end_lineno or node.lineno

    yield from visit(ast.parse(text).body, "")


def slips_of(exercise: Exercise) -> list[Slip | Planted]:
    """The mistakes to plant in an exercise. A name is a planted bug of the phase, `08:name` of another."""
    phase = exercise.id[:2]
    if not (Path(__file__).parent / f"slips_{phase}.py").exists():
        return []
    listed = importlib.import_module(f"tests.course.slips_{phase}").SLIPS.get(exercise.id, ())
    found: list[Slip | Planted] = []
    for one in listed:
        if isinstance(one, str):
            other, _, name = one.rpartition(":")
            known = {bug.name: bug for bug in bugs_of(other or phase)}
            if name not in known:
                raise DoesNotApply(f"{exercise.id}: no planted bug of phase {other or phase} is named {name}")
            found.append(Planted(known[name]))
        else:
            found.append(one)
    return found
