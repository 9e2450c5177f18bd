"""A student's working copy: lessons, tests, and files with blank functions. Nothing in it holds an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from phases import PHASES, ROOT
from phases.course.blanks import blank, without
from phases.course.exercises import Exercise, Question, exercises, files_of, questions
from phases.course.lessons import lines_of, masked, pages

COURSE, ANSWERS, GUIDE = "course.json", "answers.json", "README.md"
LARGEST = 1 << 22
"""Characters of a file that somebody hands in."""


@dataclass(frozen=True)
class Copy:
    """A student's working copy as it lies on disk."""

    folder: Path
    exercises: tuple[Exercise, ...]
    questions: tuple[Question, ...]
    made_from: str
    """`fingerprint` of what it was made from."""


def made_files(chosen: Iterable[Exercise]) -> dict[str, str]:
    """Every file of a copy with these exercises, by its path: always the same from the same reference."""
    chosen = tuple(chosen)
    blanks = files_of(chosen)
    bodies: dict[str, list[str]] = {}
    ids: dict[str, str] = {}
    made: dict[str, str] = {}
    for file, names in blanks.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        made[file] = blank(source, names)
        bodies |= {f"{file}:{name}": lines for name, lines in lines_of(source, names).items()}
        ids |= {f"{file}:{name}": given for name, given in names.items() if given}
    for file in sorted({node.partition("::")[0] for exercise in chosen for node in exercise.tests}):
        made[file] = without((ROOT / file).read_text(encoding="utf-8"), hidden_in(file))
    phases = [phase for phase in PHASES if any(exercise.phase is phase for exercise in chosen)]
    for phase in phases:
        for page in pages(phase):
            made[f"phases/{phase.name}/{page.name}"] = masked(page, bodies, ids)
    made[GUIDE] = guide(chosen, [asked for asked in questions() if asked.phase in phases])
    return made


def hidden_in(file: str) -> set[str]:
    """The names of the hidden tests in a file of tests; whatever one exercise shows is shown."""
    shown = {node.partition("[")[0] for exercise in exercises() for node in exercise.tests}
    kept = {node.partition("[")[0] for exercise in exercises() for node in exercise.hidden} - shown
    return {node.split("::")[-1] for node in kept if node.startswith(file + "::")}


def make(folder: Path, chosen: tuple[Exercise, ...]) -> Copy:
    """Write a working copy into a folder that is empty or not there.

    Raises:
        UserError: something is there, or it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty: a working copy begins in an empty folder, or a new one")
    if ROOT.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(f"{folder} is in the course's own checkout: make the working copy elsewhere")
    made = made_files(chosen)
    asked = [question.id for question in questions() if any(one.phase is question.phase for one in chosen)]
    about = {
        "exercises": [exercise.id for exercise in chosen],
        "questions": asked,
        "made_from": fingerprint(made),
    }
    made = {**made, COURSE: json.dumps(about, indent=1) + "\n", ANSWERS: "{}\n"}
    for file, text in made.items():
        path = folder / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return opened(folder)


def text_in(folder: Path, file: str, errors: str = "strict") -> str:
    """The text of a file of a copy, which may be anybody's: a pipe or a device would never end.

    errors: of what is no text; see `open`.

    Raises:
        OSError: it is no plain file there, or too large.
        UnicodeDecodeError: it is no text.
    """
    path = folder / file
    if path.is_symlink() or not path.is_file() or folder.resolve() not in path.resolve().parents:
        raise FileNotFoundError(f"{file} is no file of this copy")
    with path.open(encoding="utf-8-sig", errors=errors) as opened_file:
        text = opened_file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise OSError(f"{file} is larger than {LARGEST:,} characters")
    return text


def parsed(text: str) -> Any:
    """JSON of anybody's. Raises `ValueError` for what is none, however deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def fingerprint(made: dict[str, str]) -> str:
    """One number for all that a copy was made of."""
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


def opened(folder: Path) -> Copy:
    """The working copy in a folder. Raises `UserError` when there is none."""
    try:
        about = parsed(text_in(folder, COURSE))
        wanted, asked = set(about["exercises"]), set(about["questions"])
        made_from = str(about["made_from"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is no working copy: `ladder course make DIR` makes one") from None
    chosen = tuple(exercise for exercise in exercises() if exercise.id in wanted)
    return Copy(folder, chosen, tuple(one for one in questions() if one.id in asked), made_from)


def around(folder: Path) -> Copy:
    """The working copy that a folder lies in. Raises `UserError` when it lies in none."""
    for place in (folder, *folder.parents):
        if (place / COURSE).is_file():
            return opened(place)
    raise UserError(
        f"{folder} is in no working copy: `ladder course make DIR` makes one, and `cd DIR` goes there"
    )


def guide(chosen: Iterable[Exercise], asked: Iterable[Question]) -> str:
    """The copy's own page: what to do, and what there is."""
    lines = [
        "# Coursework",
        "",
        "Fill in the functions that raise `NotImplementedError`. Everything else is taken from the course's",
        "own checkout, so each exercise can be solved by itself. The order is that in which they build on",
        "each other.",
        "",
        "```",
        "ladder course check          # a line for each exercise; `ladder course check 05.3` for one",
        "ladder course hint 05.3      # three levels: what must hold, a worked example, pseudocode",
        "ladder course watch          # check whenever a file is saved",
        "ladder course answer 05.p1 2 # an answer to predict or to measure",
        "ladder course solution 05.3  # the difference to the course's own; it is noted, like every hint",
        "```",
        "",
        "What counts are the functions named here, and new functions, constants and imports beside them.",
        "",
        "| exercise | | points | file | functions |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for one in chosen:
        names = ", ".join(f"`{name}`" for name in one.functions)
        lines.append(
            f"| {one.id} | {one.title} | {one.points} | [{Path(one.file).name}]({one.file}) | {names} |"
        )
    lines += ["", "| question | | points |", "| --- | --- | ---: |"]
    lines += [f"| {one.id} | {one.question} | {one.points} |" for one in asked]
    files = {one.file for one in chosen}
    held = sorted({name for one in chosen for name in one.masked if name.partition(":")[0] in files})
    if held:
        lines += [
            "",
            "Held back as well, because they would give an answer away (the course's own are used):",
            "",
        ]
        lines += [f"- `{name.partition(':')[2]}` in {name.partition(':')[0]}" for name in held]
    return "\n".join(lines) + "\n"
