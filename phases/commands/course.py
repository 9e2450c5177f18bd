"""`ladder course`: exercises in a working copy."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from common.console import err, out
from common.errors import UserError, number
from common.names import choice
from phases.commands.arguments import course_app
from phases.course import grading, hints, making
from phases.course.checking import Failure, State, Verdict, check_file
from phases.course.exercises import Exercise, find_question, of_phases
from phases.course.fork_server import ForkServer

WIDEST = 100
LOOK = 0.5
"""Seconds between two checks of the files' times."""
STYLES: dict[State, str] = {
    "not started": "dim",
    "refused": "red",
    "fails": "red",
    "breaks a later phase": "yellow",
    "passes here": "green",
}


ExerciseId = Annotated[str, typer.Argument(metavar="EXERCISE", help="such as 05.3")]


def say(text: str, **style: Any) -> None:
    """Print `text` on the terminal as one line, however long.

    style: keyword arguments of rich's `Console.print`.
    """
    out.print(text, soft_wrap=True, **style)


@course_app.command()
def make(
    folder: Path = typer.Argument(
        metavar="DIR", help="an empty folder, or one that is not there"
    ),
    phases: str | None = typer.Option(
        None, help="such as 05, 02-05 or 02,05-07; by default all"
    ),
) -> int:
    """Make a working copy with blank functions, the lessons, and the tests that are shown."""
    copy = making.make(folder, of_phases(phases))
    place = escape(str(folder))
    out.print(
        f"{len(copy.exercises)} exercises in {place}, and {len(making.about(copy.exercises)[1])} questions."
    )
    out.print(f"Next: cd {place}, read README.md, and run `ladder course check`.")
    return 0


@course_app.command()
def check(
    exercise: str | None = typer.Argument(
        None, metavar="[EXERCISE]", help="such as 05.3, or 05"
    ),
) -> int:
    """Show the state of each exercise, and the first case or test that fails in one."""
    copy, chosen = _chosen(exercise)
    wrong = False
    making.link(copy.folder)
    with err.status("Starting: PyTorch is imported once") as status, ForkServer() as server:
        for one in chosen:
            status.update(f"{one.id} {one.title}")
            verdict = check_file(copy.folder, one, server)
            show(verdict)
            wrong |= not verdict.right and verdict.state != "not started"
    return int(wrong)


def _chosen(wanted: str | None) -> tuple[making.Copy, list[Exercise]]:
    """Return the student's working copy around the current directory, and the exercises that `wanted` means.

    wanted: an exercise `05.3`, a phase `05`, or None for all exercises of the copy.

    Raises:
        UserError: there is no copy here, or no such exercise in it.
    """
    copy = making.around(Path.cwd())
    phase, dot, number = (wanted or "").partition(".")
    full = phase.rjust(2, "0") + dot + number  # 1.2 means 01.2
    chosen = [one for one in copy.exercises if wanted is None or full in (one.id, one.id[:2])]
    if wanted is not None and not chosen:
        known = ", ".join(one.id for one in copy.exercises)
        raise UserError(f"exercise is {wanted!r}, but this copy has {known}")
    return copy, chosen


def show(verdict: Verdict) -> None:
    """Print the state of a checked exercise, and the lines about its failure if it has one."""
    one = verdict.exercise
    style = STYLES[verdict.state]
    say(f"{one.id}  [{style}]{verdict.state:20}[/]  {escape(one.title)}")
    if verdict.failure is not None:
        for line in lines_about(verdict.failure):
            say(f"      {escape(line)}")


def lines_about(failure: Failure) -> list[str]:
    """Return lines of text about the failure of a student's exercise, to be printed.

    They say what was given, expected and got, where it failed, and the lesson's trap (a common mistake) that
    the failure resembles. Given lines and the trap are whole; others are cut at `WIDEST` characters.
    """
    given = failure.setup.strip().splitlines() + failure.call.splitlines()
    named = [("test", failure.test), ("expected", failure.expected), ("got", failure.got)]
    named += [("", line) for line in ([] if failure.got else failure.message.splitlines())]
    named += [("raised in", failure.place), ("trap", failure.trap)]
    named += [("printed", line) for line in failure.printed.splitlines()]
    lines = [f"{'' if at else 'given':9} {line}" for at, line in enumerate(given)]
    for name, text in named:
        if not text:
            continue
        line = f"{name:9} {text}" if name else text
        cut = len(line) > WIDEST and name != "trap"
        lines.append(line[: WIDEST - 3] + "..." if cut else line)
    return lines


@course_app.command()
def hint(
    exercise: ExerciseId,
    level: int | None = typer.Option(
        None, help="1: what must hold; 2: an example; 3: pseudocode; else the next"
    ),
) -> int:
    """Show an exercise's next hint, or that of a level, and log it for the grade."""
    copy, (one, *_) = _chosen(exercise)
    if level is None:
        seen = {entry.get("level") for entry in hints.logged(copy.folder, one.id, "hint")}
        level = min(hints.LEVELS, 1 + len(seen))
    text = hints.hint(one, level)
    hints.log(copy.folder, "hint", one.id, level=level)
    out.print(f"[bold]{one.id} {escape(one.title)}[/], hint {level} of {hints.LEVELS}\n")
    say(escape(text))
    return 0


@course_app.command()
def solution(exercise: ExerciseId) -> int:
    """Show the reference's functions as a difference to yours, and log that for the grade."""
    copy, (one, *_) = _chosen(exercise)
    source = ""
    with suppress(OSError, UnicodeDecodeError):  # then all of the reference is shown
        source = making.text_in(copy.folder, one.file)
    text = hints.solution(one, source)
    hints.log(copy.folder, "solution", one.id)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in text.splitlines():
        say(escape(line), style=styles.get(line[:1]))
    return 0


@course_app.command()
def answer(
    name: str = typer.Argument(metavar="QUESTION", help="such as 05.p1 or 05.m1"),
    value: float | None = typer.Argument(
        None, metavar="[NUMBER]", help="without it, the question is shown"
    ),
) -> int:
    """Check a number against what was measured, and log it; without a number, show the question."""
    question = find_question(name)
    if value is None:
        say(f"{question.id} ({question.points} points)  {escape(question.question)}")
        return 0
    copy = making.around(Path.cwd())
    choice("question", name, [one.id for one in making.about(copy.exercises)[1]])
    right = grading.is_right(question, number("NUMBER", value, low=0, high=1e9))
    hints.log(copy.folder, "answer", question.id, answer=value)
    if not right:
        out.print(
            f"{question.id}  [red]no[/]: not within {question.tolerance:.0%} of what was measured"
        )
        return 1
    known = grading.truth(question)
    out.print(
        f"{question.id}  [green]yes[/]: {known:.3g} was measured, in {question.evidence}"
    )
    say(f"      {escape(question.why)}")
    return 0


@course_app.command()
def watch() -> int:
    """Check an exercise whenever its file is saved, until Ctrl-C."""
    copy = making.around(Path.cwd())
    with (
        suppress(KeyboardInterrupt),
        err.status("Starting: PyTorch is imported once") as status,
        ForkServer() as server,
    ):
        seen = _saved(copy)
        out.print("Watching. Save a file to check its exercises; Ctrl-C ends this.")
        while True:
            status.update("Waiting for a file to be saved")
            time.sleep(LOOK)
            now = _saved(copy)
            for one in copy.exercises:
                # A missing file comes back: editors write a new one and rename it.
                if one.file in now and now[one.file] != seen.get(one.file):
                    status.update(f"{one.id} {one.title}")
                    show(check_file(copy.folder, one, server))
            seen = {**seen, **now}
    return 0


def _saved(copy: making.Copy) -> dict[str, int]:
    """Return {path: modification time in ns} of the existing files of a working copy's exercises."""
    found = {}
    for file in {one.file for one in copy.exercises}:
        with suppress(FileNotFoundError):
            found[file] = (copy.folder / file).stat().st_mtime_ns
    return found


@course_app.command()
def grade(
    folder: Path = typer.Argument(metavar="DIR", help="a working copy"),
    as_json: bool = typer.Option(False, "--json", help="everything, as one JSON object"),
    phases: str | None = typer.Option(
        None, help="what was asked for, such as 02-05; by default all of the copy"
    ),
    key: bool = typer.Option(
        False, "--key", help="print the right number of each question, for a teacher"
    ),
    gradescope: bool = typer.Option(
        False, "--gradescope", help="as a results.json of Gradescope's autograder"
    ),
) -> int:
    """Score a working copy with all tests, hidden ones included."""
    if as_json and gradescope:
        raise UserError(
            "--json and --gradescope are both given, but one of them is the form of the output"
        )
    making.opened(folder)
    asked = of_phases(phases) if phases else ()
    with err.status("Grading"), ForkServer() as server:
        if server.gaps:
            err.print(escape(server.gaps), style="yellow", soft_wrap=True)
        scores = grading.grade(folder, server, asked=asked, key=key)
    if as_json or gradescope:
        shape = grading.as_gradescope if gradescope else grading.as_json
        print(json.dumps(shape(scores), indent=1))
        return 0
    table = Table("exercise", "points", "state", "hints", "why")
    for one in scores:
        more = (
            f"guesses: {one.guesses}"
            if one.guesses
            else f"{one.hints}" + ", solution" * one.solution_shown
        )
        table.add_row(
            one.id, f"{one.points:g} of {one.most}", one.state, more, escape(one.reason)
        )
    out.print(table)
    out.print(
        f"{sum(one.points for one in scores):g} of {sum(one.most for one in scores)} points"
    )
    return 0
