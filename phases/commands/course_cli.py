"""The arguments of `ladder course`. What the commands do is in `phases.commands.course`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

course_app = typer.Typer(
    help="Exercises: make a working copy, check it, ask for hints, grade it.", no_args_is_help=True
)

ExerciseId = Annotated[str, typer.Argument(metavar="EXERCISE", help="such as 05.3")]


@course_app.command("make")
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="an empty folder, or one that is not there")],
    phases: Annotated[str | None, typer.Option(help="such as 05, 02-05 or 02,05-07; by default all")] = None,
) -> int:
    """Make a working copy with blank functions, the lessons, and the tests that are shown."""
    from phases.commands import course

    return course.make(folder, phases)


@course_app.command("check")
def check(
    exercise: Annotated[str | None, typer.Argument(metavar="[EXERCISE]", help="such as 05.3, or 05")] = None,
) -> int:
    """Say of each exercise how far it is, and of one that fails the first small case."""
    from phases.commands import course

    return course.check(exercise)


@course_app.command("hint")
def hint(
    exercise: ExerciseId,
    level: Annotated[
        int | None,
        typer.Option(help="1: what must hold; 2: an example; 3: an outline; 4: pseudocode; else the next"),
    ] = None,
) -> int:
    """Show a hint, one level after the other, and note it."""
    from phases.commands import course

    return course.hint(exercise, level)


@course_app.command("solution")
def solution(exercise: ExerciseId) -> int:
    """Show what the reference does, as a difference to yours, and note it."""
    from phases.commands import course

    return course.solution(exercise)


@course_app.command("answer")
def answer(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="such as 05.p1 or 05.m1")],
    value: Annotated[
        float | None, typer.Argument(metavar="[NUMBER]", help="without it, the question is shown")
    ] = None,
) -> int:
    """Answer a question whose answer has been measured."""
    from phases.commands import course

    return course.answer(question, value)


@course_app.command("watch")
def watch() -> int:
    """Check an exercise whenever its file is saved, until Ctrl-C."""
    from phases.commands import course

    return course.watch()


@course_app.command("grade")
def grade(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a working copy")],
    as_json: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
    gradescope: Annotated[
        bool, typer.Option("--gradescope", help="as a results.json of Gradescope's autograder")
    ] = False,
) -> int:
    """Score a working copy with all tests, hidden ones included."""
    from phases.commands import course

    return course.grade(folder, as_json=as_json, gradescope=gradescope)
