"""What lessons explain stands in the glossary, once; what the paths through the course say of hours is so."""

from __future__ import annotations

import ast
import re

import pytest

from phases import PHASES, ROOT, Phase

ENTRY = re.compile(r"^\*\*(.+?)\*\*(?:, [^(]+?)? \((\d\d)\)", re.M)
WORDS = 6
"""Rows of the glossary's table whose words stand in no docstring; those below are everyday words, too."""
HELD = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15)
"""Phases whose docstrings keep to the table."""


def entries() -> list[tuple[str, int]]:
    """Every term of the glossary with the number of its phase."""
    found = ENTRY.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    return [(term, int(number)) for terms, number in found for term in terms.split(", ")]


def test_no_term_stands_there_twice() -> None:
    terms = [term for term, _ in entries()]
    assert len(terms) > 100
    assert sorted({term for term in terms if terms.count(term) > 1}) == []


def unused_words() -> list[str]:
    """The words that the glossary's table says are not used for code, the first rows' only."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = page.split("## One word, one meaning")[1]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", table, re.M)[2:]
    return [word for row in rows[:WORDS] for word in row.split(", ")]


@pytest.mark.parametrize(
    "phase", [phase for phase in PHASES if phase.number in HELD], ids=lambda phase: phase.name
)
def test_docstrings_name_the_actor(phase: Phase) -> None:
    banned = re.compile(rf"\b(?:{'|'.join(unused_words())})\b", re.IGNORECASE)
    found = []
    for path in sorted((phase.folder / phase.package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                words = banned.findall(str(node.value.value))
                found += [f"{path.relative_to(ROOT)}:{node.lineno} {word}" for word in words]
    assert found == []


def test_the_paths_say_the_hours_of_the_phases() -> None:
    page = (ROOT / "docs" / "paths.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d\d) .*?\]\(.*?\) \| (\d+) \|", page, re.M)
    assert rows == [(f"{phase.number:02d}", f"{phase.hours:g}") for phase in PHASES]
    hours = {phase.number: phase.hours for phase in PHASES}
    assert f"That is {sum(hours.values()):g} hours in all" in page
    for told, numbers in re.findall(r"\*\*, (\d+) hours: ([\d, and]+)", page):
        found = sum(hours[int(number)] for number in re.findall(r"\d\d", numbers))
        assert int(told) == found, f"the path {numbers} takes {found} hours, not {told}"
