"""The code that lessons show is taken from the source, whole or in part, and says so when it cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.excerpts import EXCERPT, fill
from common.errors import UserError
from phases import PHASES, ROOT, Phase

SOURCE = '''
class Counter:
    """Counts."""

    @property
    def count(self) -> int:
        """How many."""
        # A reason.
        return self._count

    def up(self) -> None:
        """One more."""
        self._count += 1
        if self._count > 3:
            self._count = 0
        print(self._count)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def shown(words: str, folder: Path) -> str:
    """What stands between the two comments after filling in."""
    filled = fill(
        f"Text.\n<!-- code: {words} -->\nold\n<!-- /code -->\n".replace("old\n", ""), folder
    )
    assert fill(filled, folder) == filled, "filling in twice changes something"
    return filled.split("-->\n", 1)[1].split("<!-- /code")[0]


def test_functions_without_class_docstring_and_indentation(folder: Path) -> None:
    assert shown("code.py Counter.count", folder) == (
        "```python\n# code.py\n@property\ndef count(self) -> int:\n"
        "    # A reason.\n    return self._count\n```\n"
    )


def test_the_places_of_a_request_are_fresh() -> None:
    page = ROOT / "docs" / "a_request.md"
    text = page.read_text(encoding="utf-8")
    assert fill(text, page.parent) == text, "run `python -m benchmarks.tables`"
    classes = re.findall(r"<!-- at: \S+ (\w+)", text)
    assert len(classes) >= 15, (
        "the page follows a request through fewer stations than there are"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("gone.py f", "gone.py"),
        ("code.py Counter.down", "Counter.down"),
        ("code.py Counter.up from=while to=print", "'while'"),
        ("code.py Counter.up from=print to=if", "'if'"),
    ],
)
def test_what_is_not_there_is_named(words: str, says: str, folder: Path) -> None:
    with pytest.raises(UserError, match=says):
        shown(words, folder)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_lesson_shows_the_lines_that_carry_its_idea(phase: Phase) -> None:
    """Ten to forty lines, and they stand in the section on the code."""
    lesson = (phase.folder / "README.md").read_text(encoding="utf-8")
    blocks = [found[0] for found in EXCERPT.finditer(lesson)]
    lines = sum(len(block.splitlines()) - 5 for block in blocks)
    assert 10 <= lines <= 40, f"the lesson of {phase.name} shows {lines} lines of its code"
    section = re.search(r"^## 3\..*?^## 4\.", lesson, re.M | re.DOTALL)
    assert section is not None and EXCERPT.search(section[0]), (
        f"{phase.name}: no code in section 3"
    )
