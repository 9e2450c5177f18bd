"""Lessons have one anatomy, and the numbers in their sentences are generated or worked out."""

from __future__ import annotations

import re
from functools import cache

import pytest

from benchmarks import numbers
from benchmarks.tables import TREE, markdown_files, phase_map
from common.errors import UserError
from phases import PHASES, ROOT, Phase
from tests.prose import unmarked

SECTIONS = (
    "The problem", "The idea", "The code", "Run it", "Traps", "Measure it", "Exercises", "Sources",
    "What is now the bottleneck",
)  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PINNED = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/\S+?(?=\))")
every_lesson = pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)


def lesson(phase: Phase) -> str:
    return (phase.folder / "README.md").read_text(encoding="utf-8")


def sections(phase: Phase) -> dict[int, str]:
    """A lesson's sections by their numbers."""
    found = re.split(r"^## (?=\d\. )", lesson(phase), flags=re.MULTILINE)[1:]
    return {int(text[0]): text for text in found}


@cache
def known_tests() -> set[str]:
    files = [*ROOT.glob("tests/**/*.py")]
    return {
        name
        for path in files
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }


@every_lesson
def test_a_lesson_has_nine_sections_and_the_map(phase: Phase) -> None:
    titles = re.findall(r"^## (.*)$", lesson(phase), re.MULTILINE)
    assert titles == [f"{number}. {title}" for number, title in enumerate(SECTIONS, 1)]
    assert phase_map(phase.name) in lesson(phase)
    assert f"[{phase.number:02d}]" in phase_map(phase.name)


def test_the_map_has_every_phase_once() -> None:
    shown = re.findall(r"(?<!behind )\d\d", TREE)
    assert sorted(shown) == [f"{phase.number:02d}" for phase in PHASES]


@pytest.mark.parametrize("phase", PHASES[1:], ids=lambda phase: phase.name)
def test_a_problem_has_a_number_that_was_measured_before(phase: Phase) -> None:
    named = re.findall(r"<!--n:([\w.]+)-->", sections(phase)[1])
    assert named, "section 1 names no measured number"


@every_lesson
def test_an_idea_has_a_picture_and_an_example_by_hand(phase: Phase) -> None:
    idea = sections(phase)[2]
    assert "![" in idea or FENCE.search(idea), "no picture"
    assert "**By hand.**" in idea, "no example by hand"


@every_lesson
def test_a_command_is_followed_by_what_it_prints(phase: Phase) -> None:
    blocks = [text for language, text in FENCE.findall(sections(phase)[4]) if not language]
    commands = [text for text in blocks if re.match(r"(\.venv/bin/)?ladder ", text)]
    assert commands, "section 4 has no command"
    assert set(blocks) > set(commands), "nothing shows what a command prints"


@every_lesson
def test_every_trap_names_a_test_that_exists(phase: Phase) -> None:
    traps = sections(phase)[5]
    named = set(re.findall(r"`(test_\w+)(?:\[[^\]`]*\])?`", traps))
    assert len(named) >= 5
    assert named <= known_tests(), sorted(named - known_tests())


@every_lesson
def test_measuring_has_command_figure_table_and_where_it_loses(phase: Phase) -> None:
    measure = sections(phase)[6]
    assert re.search(r"^(\.venv/bin/)?ladder bench ", measure, re.MULTILINE)
    assert "](../../figures/" in measure and "<!-- table: " in measure
    assert "**Where it loses" in measure


@every_lesson
def test_sources_say_what_to_read_next_at_a_commit(phase: Phase) -> None:
    sources = sections(phase)[8]
    assert "**Read next**" in sources and PINNED.search(sources)
    assert (
        "[phase" in sections(phase)[9].lower()
        or "](../" in sections(phase)[9]
        or phase is PHASES[-1]
    )


@every_lesson
def test_numbers_of_measurements_are_generated(phase: Phase) -> None:
    assert list(unmarked(lesson(phase))) == [], "see benchmarks/numbers.py"
    page = phase.folder / "measurements.md"
    if page.exists():
        assert list(unmarked(page.read_text(encoding="utf-8"), sections=("",))) == []


def test_marks_are_whole_and_do_not_begin_a_line() -> None:
    """A line that begins with a comment is raw HTML to Markdown; an open mark hides numbers."""
    for path in markdown_files():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*<!--(?:n:|w-->)", text, re.MULTILINE), (
            f"{path}: a mark begins a line"
        )
        for begin, end in (
            ("<!--n:", "<!--/n-->"),
            ("<!--w-->", "<!--/w-->"),
            ("<!--worked-->", "<!--/worked-->"),
        ):
            assert text.count(begin) == text.count(end), (
                f"{path}: {begin} and {end} do not pair"
            )


def test_every_entry_is_used() -> None:
    texts = [path.read_text(encoding="utf-8") for path in markdown_files()]
    used = {name for text in texts for name in re.findall(r"<!--n:([\w.-]+)-->", text)}
    assert used == {
        f"{table}.{key}" for table, found in numbers.entries().items() for key in found
    }


def test_a_number_is_read_from_the_evidence() -> None:
    assert numbers.value("08.computed") == "859"
    filled = numbers.fill("it computed <!--n:08.computed-->0<!--/n--> tokens")
    assert filled == "it computed <!--n:08.computed-->859<!--/n--> tokens"
    with pytest.raises(UserError, match=r"09\.nothing"):
        numbers.fill("<!--n:09.nothing-->0<!--/n-->")


MOST = 800
"""Lines that must be read: what fits into one sitting."""


@every_lesson
def test_what_must_be_read_fits_into_one_sitting(phase: Phase) -> None:
    found = re.search(r"<!-- must read -->(.*?)<!-- /must read -->", lesson(phase), re.DOTALL)
    assert found, f"the lesson of {phase.name} does not say what must be read"
    cells = [line.split("|")[1] for line in found[1].splitlines() if line.startswith("| [")]
    files = [
        phase.folder / link
        for cell in cells
        for link in re.findall(r"\]\(([^)]+\.py)\)", cell)
    ]
    assert files, f"the lesson of {phase.name} names no file that must be read"
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert sum(lines.values()) <= MOST, (
        f"{sum(lines.values())} lines must be read in {phase.name}: {lines}"
    )


@every_lesson
def test_a_lesson_names_every_file_of_its_package(phase: Phase) -> None:
    text = lesson(phase)
    files = [path for path in phase.folder.rglob("*.py") if path.parent != phase.folder]
    assert files, f"{phase.name} has no package"
    missing = [
        path.name for path in files if path.stem != "__init__" and path.name not in text
    ]
    assert missing == [], f"the lesson of {phase.name} does not name {missing}"


def test_logs_are_dated() -> None:
    for path in sorted((ROOT / "docs" / "log").glob("[0-9][0-9].md")):
        headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings and all(
            re.search(r"2026-\d\d-\d\d", heading) for heading in headings
        ), path.name


# What lessons explain stands in the glossary, once; what the paths through the course say of hours is so.


ENTRY = re.compile(r"^\*\*(.+?)\*\*(?:, [^(]+?)? \((\d\d)\)", re.M)


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
    for told, path in re.findall(r"\*\*, (\d+) hours: ([\d, and]+)", page):
        found = sum(hours[int(number)] for number in re.findall(r"\d\d", path))
        assert int(told) == found, f"the path {path} takes {found} hours, not {told}"
