"""Read the traps (common mistakes) of lessons; copy lessons and notebooks without exercises' solutions."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from phases import ROOT, Phase
from phases.course.blanks import functions

MEASURED = re.compile(r"^(## \d\. Measure it\n).*?(?=^## \d|\Z)", re.M | re.DOTALL)
TARGET = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^()\s#]+)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^()\s]+\.(?:png|svg))\)")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://)[^)]*\)")
FENCE = re.compile(r"^```(?:python|py)\n(.*?)^```\n", re.M | re.DOTALL)
CHECKOUT = "checkout"
"""A link in a copy to the checkout that the `ladder` command belongs to."""
TELLING = 40
"""Characters of a line of code that gives an answer away by itself."""


def pages(phase: Phase) -> list[Path]:
    """Return the files of a phase's lesson: README.md, and for some phases a page of measurements."""
    return sorted(phase.folder.glob("*.md"))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _traps(phase: Phase) -> list[str]:
    """Return the rows of the table of traps (common mistakes) in a phase's lesson, a text for each."""
    lesson = _text(phase.folder / "README.md")
    found = re.search(r"^## \d\. Traps.*?(?=^## \d)", lesson, re.M | re.DOTALL)
    lines = found[0].splitlines() if found else []
    return [line for line in lines if line.startswith("| ") and "---" not in line][1:]


def trap_of(phase: Phase, test: str) -> str:
    """Return the text of the trap (a common mistake, a row of the lesson's table) that a test catches.

    test: the test's name. Returns "" if the test catches no trap, or several.
    """
    name = test.partition("[")[0]
    rows = [row for row in _traps(phase) if re.search(rf"\b{re.escape(name)}\b", row)]
    return _trap_text(rows[0]) if len(rows) == 1 else ""


def trap_with(phase: Phase, words: str) -> str:
    """Return the text of a lesson's first trap (a common mistake, a row of its table) that contains `words`.

    "" if none does.
    """
    return next((_trap_text(row) for row in _traps(phase) if words in row), "")


def _trap_text(row: str) -> str:
    """Return the text of a row of the table of traps, without the name of its test and without markup."""
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    text = ": ".join(cell for cell in cells if cell and "`test_" not in cell)
    return LINK.sub(r"\1", text)


def bodies_of(source: str, names: Collection[str]) -> dict[str, list[str]]:
    """Return the bodies of functions in `source`: {qualified name: lines}.

    names: qualified names of the functions. Lines have no docstring, comments and indentation.
    """
    found = {}
    for name, node in functions(source).items():
        if name in names:
            inner = node.body[ast.get_docstring(node) is not None :]
            text = ast.unparse(ast.Module(body=inner, type_ignores=[]))
            found[name] = [line.strip() for line in text.splitlines()]
    return found


def gives_away(text: str, bodies: Mapping[str, list[str]]) -> str:
    """Return the name of the function whose solution the code `text` shows most of; "" if it shows none.

    Code shows a solution by two neighbouring lines of it, or one long line. bodies: name -> lines of the
    solution.
    """
    try:
        lines = [line.strip() for line in ast.unparse(ast.parse(text)).splitlines()]
    except SyntaxError:
        lines = [re.sub(r"\s+#.*", "", line.strip()) for line in text.splitlines()]
    pairs = set(pairwise(lines))
    given = ""
    most = 0
    for name, body in bodies.items():
        telling = {
            line for line in body if len(line) >= TELLING and not line.startswith("raise ")
        }
        shared = len(pairs.intersection(pairwise(body))) + len(telling.intersection(lines))
        if shared > most:
            given, most = name, shared
    return given


def masked(
    page: Path,
    bodies: Mapping[str, list[str]],
    notes: Mapping[str, str],
    questions: Sequence[str],
) -> str:
    """Return a lesson's page for students: code that shows a solution is replaced, HTML comments are
    removed.

    page: the lesson's file. bodies: `file:function` -> lines of the solution. notes: `file:function` -> the
        text that replaces such code.
    questions: ids of the questions that the page's measurements would answer; if any, measurements are left
        out.
    """
    text = FENCE.sub(
        lambda found: notes.get(gives_away(found[1], bodies), found[0]), _text(page)
    )
    if questions:
        command = f"`ladder course answer {questions[0]} NUMBER`"
        first = f"*First answer {', '.join(questions)}: {command}. Then read it in the checkout's lesson.*"
        if page.name == "measurements.md":
            return f"# Measurements\n\n{first}\n"
        text = MEASURED.sub(lambda found: f"{found[1]}\n{first}\n\n", text)
    return re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)


def notebook(path: Path, bodies: Mapping[str, list[str]], notes: Mapping[str, str]) -> str:
    """Return a notebook's JSON without outputs; cells that show a solution are replaced by a comment.

    path: the notebook. bodies: `file:function` -> lines of the solution. notes: `file:function` -> the text
        of the comment.
    """
    book = json.loads(_text(path))
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
            place = gives_away("".join(cell["source"]), bodies)
            cell["source"] = [f"# {notes[place].strip()}"] if place else cell["source"]
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def pictures(made: Mapping[str, str]) -> set[str]:
    """Return the paths of the picture files that pages link to, relative to the checkout.

    made: path -> text, of which those that end in .md are pages.
    """
    found = {
        posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        for file, text in made.items()
        if file.endswith(".md")
        for target in PICTURE.findall(text)
    }
    return {file for file in found if (ROOT / file).is_file()}


def linked(text: str, file: str, there: Collection[str]) -> str:
    """Return a page's text whose relative links work in a student's copy: files that the copy lacks are
    linked in the checkout that it was made from.

    file: the page's own path in the copy. there: the paths of the copy's files.
    """

    def moved(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[1]))
        return found[1] if path in there else f"{'../' * file.count('/')}{CHECKOUT}/{path}"

    return TARGET.sub(moved, text)
