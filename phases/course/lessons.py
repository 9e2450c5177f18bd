"""What the course takes from the lessons: traps, paragraphs, and the lesson itself without the answers."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from phases import Phase

LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://)[^)]*\)")
FENCE = re.compile(r"^```(?:python|py)\n(.*?)^```\n", re.M | re.DOTALL)
TELLING = 40
"""Characters of a line of code that gives an answer away by itself."""


def pages(phase: Phase) -> list[Path]:
    """A phase's lesson; phase 14's has two pages."""
    return sorted(phase.folder.glob("*.md"))


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _traps(phase: Phase) -> list[str]:
    """The rows of a lesson's traps, each as one line of text."""
    traps: list[str] = []
    for page in pages(phase):
        found = re.search(r"^## \d\. Traps.*?(?=^## \d)", _text(page), re.M | re.DOTALL)
        section = found[0] if found else ""
        traps += [line for line in section.splitlines() if line.startswith("| ") and "---" not in line][1:]
        traps += re.findall(r"^- .*?(?=^- |^$|\Z)", section, re.M | re.DOTALL)
    return traps


def trap_of(phase: Phase, test: str) -> str:
    """The trap that this test catches, or nothing."""
    name = test.partition("[")[0]
    return next((_told(row) for row in _traps(phase) if re.search(rf"\b{re.escape(name)}\b", row)), "")


def trap_with(phase: Phase, words: str) -> str:
    """The trap with these words, or nothing."""
    return next((_told(row) for row in _traps(phase) if words in row), "")


def _told(row: str) -> str:
    """A row without its test and its markup."""
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    text = ": ".join(cell for cell in cells if cell and "`test_" not in cell) or row.lstrip("- ")
    text = re.sub(r"\s+", " ", LINK.sub(r"\1", text))
    return text.split(": `test_")[0]


def paragraph(phase: Phase, begins: str) -> str:
    """The paragraph of a lesson that begins so. Raises `KeyError` when there is none, or more than one."""
    text = "\n\n".join(map(_text, pages(phase)))
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text)]
    bare = begins.replace("*", "")
    found = [block for block in blocks if block.replace("*", "").lstrip("- ").startswith(bare)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} paragraphs of {phase.name}'s lesson begin with {begins!r}")
    return plain(found[0])


def plain(text: str) -> str:
    """Markdown without links to files and without comments."""
    return re.sub(r"<!--.*?-->\n?", "", LINK.sub(r"\1", text), flags=re.DOTALL)


def lines_of(source: str, names: Collection[str]) -> dict[str, list[str]]:
    """For each function the lines of its body, without docstring, comments and indentation."""
    found: dict[str, list[str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and prefix + node.name in names:
                inner = node.body[1:] if ast.get_docstring(node) is not None else node.body
                text = ast.unparse(ast.Module(body=inner, type_ignores=[]))
                found[prefix + node.name] = [line.strip() for line in text.splitlines()]

    visit(ast.parse(source).body, "")
    return found


def gives_away(text: str, bodies: Mapping[str, list[str]]) -> str:
    """The function whose answer code gives away most: by two of its lines in a row, or a long one."""
    try:
        lines = [line.strip() for line in ast.unparse(ast.parse(text)).splitlines()]
    except SyntaxError:
        lines = [re.sub(r"\s+#.*", "", line.strip()) for line in text.splitlines()]
    pairs, given, most = set(pairwise(lines)), "", 0
    for name, body in bodies.items():
        telling = {line for line in body if len(line) >= TELLING and not line.startswith("raise ")}
        shared = len(pairs.intersection(pairwise(body))) + len(telling.intersection(lines))
        if shared > most:
            given, most = name, shared
    return given


def masked(page: Path, bodies: Mapping[str, list[str]], ids: Mapping[str, str]) -> str:
    """A page of a lesson without code that gives an answer away, and without links to files.

    bodies and ids: by `file:function`.
    """

    def hidden(found: re.Match[str]) -> str:
        place = gives_away(found[1], bodies)
        if not place:
            return found[0]
        name = place.rpartition(":")[2]
        return f"*This code is exercise {ids[place]}, `{name}`.*\n" if place in ids else "*Held back.*\n"

    return plain(FENCE.sub(hidden, _text(page)))
