"""Mistakes in the functions of exercises, which their tests must find: `patches/NN.patch`.

Each is a line `05.1 name: one sentence on what the student got wrong` and below it a patch without line
numbers: lines that go (`-`), come (`+`) and stay (a space). The old lines occur once in the exercise's
functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phases import ROOT
from phases.course.exercises import Exercise, exercises

HEAD = re.compile(r"(\d\d\.\d+) (\S+): (.+)")


def find(name: str) -> Exercise:
    """Return the exercise of an id, such as `05.3`."""
    return next(one for one in exercises() if one.id == name)


class DoesNotApply(Exception):
    """The code has changed, so that the mistake has to change with it."""


@dataclass(frozen=True)
class Slip:
    """One mistake: the lines that it replaces, and what replaces them."""

    name: str
    mistake: str
    old: tuple[str, ...]
    new: tuple[str, ...]

    def plant(self, exercise: Exercise) -> str:
        """Return the text of the exercise's file with the mistake in it. Raises `DoesNotApply`."""
        text = (ROOT / exercise.file).read_text(encoding="utf-8")
        lines, length = text.splitlines(), len(self.old)
        found = [
            at
            for first, last in spans(text, exercise.functions)
            for at in range(first - 1, last - length + 1)
            if tuple(lines[at : at + length]) == self.old
        ]
        if len(found) != 1:
            raise DoesNotApply(
                f"{exercise.id} {self.name}: its lines occur {len(found)} times, not once"
            )
        planted = (
            "\n".join([*lines[: found[0]], *self.new, *lines[found[0] + length :]]) + "\n"
        )
        try:
            compile(planted, exercise.file, "exec")
        except SyntaxError as error:
            raise DoesNotApply(
                f"{exercise.id} {self.name} does not compile: {error}"
            ) from None
        return planted


def spans(text: str, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and last line of functions, by qualified name."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, int]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and prefix + node.name in names
            ):
                yield node.lineno, node.end_lineno or node.lineno

    yield from visit(ast.parse(text).body, "")


def slips_of(exercise: Exercise) -> list[Slip]:
    """The mistakes to plant in an exercise."""
    path = Path(__file__).parent / "patches" / f"{exercise.id[:2]}.patch"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found: list[Slip] = []
    for part in re.split(r"\n\n(?=\d\d\.)", text.strip("\n")):
        head, *lines = part.split("\n")
        named = HEAD.fullmatch(head)
        if named and named[1] == exercise.id:
            old, new = (
                tuple(line[1:] for line in lines if line[:1] in kept) for kept in ("- ", "+ ")
            )
            found.append(Slip(named[2], named[3], old, new))
    return found
