"""What lessons explain stands in the glossary, once; what the paths through the course say of hours is so."""

from __future__ import annotations

import re

from phases import PHASES, ROOT

ENTRY = re.compile(r"^\*\*(.+?)\*\*(?:, [^(]+?)? \((\d\d)\)", re.M)
"""Rows of the glossary's table whose words stand in no docstring; those below are everyday words, too."""
"""Phases whose docstrings keep to the table."""


def entries() -> list[tuple[str, int]]:
    """Every term of the glossary with the number of its phase."""
    found = ENTRY.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    return [(term, int(number)) for terms, number in found for term in terms.split(", ")]


def test_no_term_stands_there_twice() -> None:
    terms = [term for term, _ in entries()]
    assert len(terms) > 100
    assert sorted({term for term in terms if terms.count(term) > 1}) == []


def test_the_paths_say_the_hours_of_the_phases() -> None:
    page = (ROOT / "docs" / "paths.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d\d) .*?\]\(.*?\) \| (\d+) \|", page, re.M)
    hours = {int(number): int(told) for number, told in rows}
    assert [*hours] == [phase.number for phase in PHASES]
    assert f"That is {sum(hours.values())} hours in all" in page
    for told, numbers in re.findall(r"\*\*, (\d+) hours: ([\d, and]+)", page):
        found = sum(hours[int(number)] for number in re.findall(r"\d\d", numbers))
        assert int(told) == found, f"the path {numbers} takes {found} hours, not {told}"
