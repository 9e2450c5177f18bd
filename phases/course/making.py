"""Make a student's working copy: lessons, tests, and files with blank functions, without any solution."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from phases import PHASES, ROOT, Phase
from phases.course import lessons
from phases.course.blanks import blank, without
from phases.course.exercises import Exercise, Question, exercises, files_of, questions

COURSE, GUIDE = "course.json", "README.md"
HELD = "*Held back.*\n"
WITHHELD = "*This code is exercise {}, `{}`: the text around it speaks of the lines that you will write.*\n"
LARGEST = 1 << 22
"""Characters of a file that a student hands in."""


@dataclass(frozen=True)
class Copy:
    """A student's working copy on disk: its folder, and the exercises of its phases."""

    folder: Path
    exercises: tuple[Exercise, ...]
    made_from: str
    """`fingerprint` of what it was made from: every exercise of its phases, with all texts."""


def about(chosen: Iterable[Exercise]) -> tuple[list[Phase], tuple[Question, ...]]:
    """Return the phases of the chosen exercises, and all questions of these phases."""
    numbers = {exercise.phase.number for exercise in chosen}
    phases = [phase for phase in PHASES if phase.number in numbers]
    return phases, tuple(question for question in questions() if question.phase in phases)


def made_files(chosen: Sequence[Exercise]) -> dict[str, str]:
    """Return {path: text} of every text file of a working copy with these exercises.

    It is always the same for the same reference. Measurements of lessons are withheld, since the phases'
    questions ask for them.
    """
    phases, asked = about(chosen)
    blanks = files_of(chosen)
    bodies: dict[str, list[str]] = {}
    notes = {}
    made = {}
    for file, names in blanks.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        made[file] = blank(source, names)
        bodies |= {
            f"{file}:{name}": lines for name, lines in lessons.bodies_of(source, names).items()
        }
        for name, given in names.items():
            notes[f"{file}:{name}"] = WITHHELD.format(given, name) if given else HELD
    for file in sorted(
        {node.partition("::")[0] for exercise in chosen for node in exercise.tests}
    ):
        made[file] = without((ROOT / file).read_text(encoding="utf-8"), hidden_in(file))
    shown: dict[str, str] = {}
    for phase in phases:
        asks = [one.id for one in asked if one.phase is phase]
        shown |= {
            f"phases/{phase.name}/{page.name}": lessons.masked(page, bodies, notes, asks)
            for page in lessons.pages(phase)
        }
        file = f"notebooks/{phase.name}.ipynb"
        made[file] = lessons.notebook(ROOT / file, bodies, notes)
    there = {*made, *shown, *lessons.pictures(shown)}
    made |= {file: lessons.linked(text, file, there) for file, text in shown.items()}
    return {**made, GUIDE: guide(chosen)}


def hidden_in(file: str) -> set[str]:
    """Return the names of the hidden tests (run only for a grade) in a file of tests.

    A test that some exercise shows is not hidden.
    """
    shown = {node.partition("[")[0] for exercise in exercises() for node in exercise.tests}
    kept = {
        node.partition("[")[0] for exercise in exercises() for node in exercise.hidden
    } - shown
    return {node.split("::")[-1] for node in kept if node.startswith(file + "::")}


def make(folder: Path, chosen: tuple[Exercise, ...]) -> Copy:
    """Write a working copy with the chosen exercises into a folder that is empty or does not exist;
    return it.

    Raises:
        UserError: the folder is not empty, lies in the checkout, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not empty: a working copy begins in an empty folder, or a new one"
        )
    if ROOT.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(
            f"{folder} is in the course's own checkout: make the working copy elsewhere"
        )
    made = made_files(chosen)
    numbers = sorted({exercise.phase.number for exercise in chosen})
    facts = {"phases": numbers, "made_from": fingerprint(made)}
    texts = {**made, COURSE: json.dumps(facts) + "\n"}
    files = {file: text.encode() for file, text in texts.items()}
    files |= {file: (ROOT / file).read_bytes() for file in lessons.pictures(made)}
    for file, data in files.items():
        path = folder / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
    link(folder)
    return opened(folder)


def link(folder: Path) -> None:
    """Point the symbolic link `checkout` in a working copy at this checkout; if that fails, do nothing."""
    place = folder / lessons.CHECKOUT
    with suppress(OSError):
        if place.is_symlink():
            place.unlink()
        place.symlink_to(ROOT)


def text_in(folder: Path, file: str, errors: str = "strict") -> str:
    """Return the text of a file in a student's working copy; links, pipes and devices are refused.

    folder: the copy. file: path in it. errors: how bytes that are no UTF-8 are treated, as for Python's
        `open`.

    Raises:
        OSError: it is no regular file inside the copy, or larger than `LARGEST` bytes.
        UnicodeDecodeError: it is no text.
    """
    path = folder / file
    if (
        path.is_symlink()
        or not path.is_file()
        or folder.resolve() not in path.resolve().parents
    ):
        raise FileNotFoundError(f"{file} is no file of this copy")
    with path.open(encoding="utf-8-sig", errors=errors) as opened_file:
        text = opened_file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise OSError(f"{file} is larger than {LARGEST:,} characters")
    return text


def fingerprint(made: dict[str, str]) -> str:
    """Return a short hash of all texts of a working copy (path -> text), as hexadecimal text."""
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


def opened(folder: Path) -> Copy:
    """Return the working copy in a folder, with all exercises of its phases.

    Raises:
        UserError: the folder is no working copy.
    """
    try:
        facts = json.loads(text_in(folder, COURSE))
        numbers, made_from = set(facts["phases"]), str(facts["made_from"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{folder} is no working copy: `ladder course make DIR` makes one"
        ) from None
    chosen = tuple(exercise for exercise in exercises() if exercise.phase.number in numbers)
    return Copy(folder, chosen, made_from)


def around(folder: Path) -> Copy:
    """Return the working copy that is or contains a folder.

    Raises:
        UserError: neither the folder nor one above it is a working copy.
    """
    for place in (folder, *folder.parents):
        if (place / COURSE).is_file():
            return opened(place)
    raise UserError(
        f"{folder} is in no working copy: `ladder course make DIR` makes one, and `cd DIR` goes there"
    )


def guide(chosen: Sequence[Exercise]) -> str:
    """Return the text of a working copy's README.md.

    It lists commands, exercises, questions, notebooks, and functions that are blank but not to be written.
    """
    phases, asked = about(chosen)
    held = [
        f"- `{name}` in {file}"
        for file, names in files_of(chosen).items()
        for name, exercise in names.items()
        if not exercise
    ]
    links = {one.id: f"[{Path(one.file).name}]({one.file})" for one in chosen}
    named = {one.id: ", ".join(f"`{name}`" for name in one.functions) for one in chosen}
    rows = {
        "exercises": [
            f"| {one.id} | {one.title} | {one.points} | {links[one.id]} | {named[one.id]} |"
            for one in chosen
        ],
        "notebooks": [
            f"- [{phase.number:02d}](notebooks/{phase.name}.ipynb)" for phase in phases
        ],
        "questions": [f"| {one.id} | {one.question} | {one.points} |" for one in asked],
        "held": held or ["- nothing"],
    }
    text = Path(__file__).with_name("guide.txt").read_text(encoding="utf-8")
    return text.format(**{name: "\n".join(lines) for name, lines in rows.items()})
