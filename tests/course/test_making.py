"""A student's working copy: what is blank, what stays, and that no answer is anywhere in it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from common.errors import UserError
from phases import PHASES
from phases.course import making
from phases.course.blanks import NotThere, blank, functions, graft, is_blank
from phases.course.exercises import exercises, of_phases, questions
from phases.course.lessons import (
    CHECKOUT,
    PICTURE,
    TARGET,
    bodies_of,
    gives_away,
    trap_of,
    trap_with,
)
from phases.course.making import made_files

SOURCE = '''"""A module."""

from __future__ import annotations


class Cache:
    """Keys."""

    def write(self, k: Tensor) -> Tensor:  # noqa: X
        """Write `k [B, S, D]`.

        Raises:
            ValueError: it is full.
        """
        head = k[:, 0]  # [B, D]
        if secret := head.isnan().any():
            raise ValueError(
                f"{secret} in {head}",
            )
        secret = head * 2  # because
        return secret  # [B, D]

    @property
    def free(self) -> int:
        return self.count


def total(x):
    return sum(x)
'''


def test_a_blank_keeps_signature_docstring_and_shapes() -> None:
    made = blank(SOURCE, {"Cache.write": "05.9", "total": ""})
    assert "def write(self, k: Tensor) -> Tensor:  # noqa: X" in made and "it is full" in made
    assert "        # head: [B, D]\n        # returned: [B, D]\n" in made
    assert '        # raised: ValueError(f"{secret} in {head}")\n' in made, (
        "callers read the words of errors"
    )
    assert 'raise NotImplementedError("exercise 05.9")' in made
    assert not any(word in made for word in ("secret =", "secret :=", "because", "sum(x)"))
    assert "return self.count" in made, "what is no exercise stays"
    assert is_blank(made, "Cache.write", "05.9") and not is_blank(
        SOURCE, "Cache.write", "05.9"
    )
    with pytest.raises(NotThere, match=r"Cache\.read"):
        blank(SOURCE, {"Cache.read": "05.9"})


def test_a_graft_takes_the_functions_and_what_is_new() -> None:
    theirs = SOURCE.replace("secret = head * 2  # because", "secret = _double(head)").replace(
        "sum(x)", "0"
    )
    new = "import math\n\nTWO = 2\n\n\ndef _double(x):\n    return TWO * x\n\n\nclass Cache"
    theirs = theirs.replace("class Cache", new)
    theirs = theirs.replace(
        "    @property", "    def _more(self):\n        return 1\n\n    @property"
    )
    made = graft(SOURCE, theirs, ["Cache.write"])
    assert (
        "_double(head)" in made
        and "def _double" in made
        and "TWO = 2" in made
        and "def _more" in made
    )
    assert "sum(x)" in made, "another function is the reference's, whatever they made of it"
    assert made.index("def _double") < made.index("class Cache")
    ast.parse(made)
    assert graft(SOURCE, SOURCE, ["Cache.write", "total"]) == SOURCE
    with pytest.raises(NotThere, match="total"):
        graft(SOURCE, SOURCE.replace("def total", "def sums"), ["total"])


@pytest.mark.parametrize("change", ["renamed", "more", "default", "asynchronous", "decorated"])
def test_a_function_that_callers_would_not_know_is_not_taken(change: str) -> None:
    """The body alone would be run with the reference's parameters, and say something else than was meant."""
    head = next(line for line in SOURCE.splitlines() if "def total" in line)
    made = {
        "renamed": head.replace("(x", "(y"),
        "more": head.replace("(x", "(x, more"),
        "default": head.replace("(x", "(x=None, *_"),
        "asynchronous": "async " + head,
        "decorated": "@staticmethod\n" + head,
    }[change]
    assert made != head
    with pytest.raises(NotThere, match=r"total takes other arguments, .* def total"):
        graft(SOURCE, SOURCE.replace(head, made), ["total"])
    annotated = head.replace("(x", "(x: object")
    assert "def total" in graft(SOURCE, SOURCE.replace(head, annotated), ["total"])


def code(file: str, text: str) -> list[str]:
    if file.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return (
        [text]
        if file.endswith(".py")
        else re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.DOTALL)
    )


@pytest.mark.slow
def test_no_answer_is_anywhere_in_a_copy() -> None:
    """Neither in code nor in a lesson, not of its own phase and not of another."""
    made = made_files(exercises())
    bodies = {
        f"{exercise.id} {name}": lines
        for exercise in exercises()
        for name, lines in bodies_of(
            exercise.path.read_text(encoding="utf-8"), exercise.functions
        ).items()
    }
    found = {
        f"{file} gives {name} away"
        for file, text in made.items()
        for part in code(file, text)
        if (name := gives_away(part, bodies))
    }
    assert not found
    assert {Path(file).suffix for file in made} == {".py", ".md", ".ipynb"}, (
        "no bytecode or history"
    )


@pytest.mark.slow
def test_all_that_a_lesson_links_to_is_there(tmp_path: Path) -> None:
    """In the copy, as the pictures, or in the checkout, as the glossary."""
    copy = making.make(tmp_path / "copy", exercises())
    for page in (copy.folder / making.GUIDE, *copy.folder.glob("phases/*/*.md")):
        for target in TARGET.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page} links to {target}"
        for picture in PICTURE.findall(page.read_text(encoding="utf-8")):
            assert CHECKOUT not in picture and not (page.parent / picture).is_symlink()
    guide = (copy.folder / making.GUIDE).read_text(encoding="utf-8")
    assert (
        "(checkout/docs/glossary.md)" in guide and "(notebooks/05_paged_cache.ipynb)" in guide
    )


def test_what_was_measured_is_withheld() -> None:
    text = made_files(of_phases("05"))["phases/05_paged_cache/README.md"]
    measured = text.partition("## 6. Measure it")[2].partition("## 7.")[0]
    assert "First answer 05.p1, 05.m1" in measured and "ladder bench 05" not in measured
    assert "figures/cpu" not in text


@pytest.mark.slow
def test_no_page_shows_a_measured_answer() -> None:
    """Neither a phase's measurements nor the front page's ladder, whose gains answer predictions."""
    made = made_files(exercises())
    asks = {question.phase.name for question in questions()}
    pages = {
        file: text
        for file, text in made.items()
        if file.split("/")[1:2] and file.split("/")[1] in asks
    }
    assert any(file.endswith("measurements.md") for file in pages)
    for file, text in pages.items():
        if file.endswith(".md"):
            assert file.endswith("README.md") or (
                "First answer" in text and "|" not in text
            ), file
            assert "figures/front" not in text and "h200/ladder" not in text, file
            assert "checkout/README.md" not in text, f"{file} leads to the front page"


def test_what_is_hidden_is_not_in_a_copy() -> None:
    """A lesson shows no code of an exercise, and hidden tests are cut out."""
    lesson = made_files(of_phases("12"))["phases/12_structured/README.md"]
    assert "*This code is exercise 12.4, `Trie.walk`: the text around it" in lesson
    assert "](structured/cli.py)" not in lesson, "links to files that are not there"
    shown = functions(made_files(of_phases("05"))["tests/phases/test_05_paged_cache.py"])
    assert "test_any_schedule" in shown and "test_a_cache_of_two_blocks" not in shown


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.slow
def test_a_copy_of_each_phase(phase, tmp_path: Path) -> None:
    copy = making.make(tmp_path / "copy", of_phases(f"{phase.number:02d}"))
    assert {exercise.phase.name for exercise in copy.exercises} == {phase.name}
    for exercise in copy.exercises:
        source = (copy.folder / exercise.file).read_text(encoding="utf-8")
        compile(source, exercise.file, "exec")
        assert all(is_blank(source, name, exercise.id) for name in exercise.functions)
        assert exercise.id in (copy.folder / "README.md").read_text(encoding="utf-8")
    assert making.around(copy.folder / "phases").folder == copy.folder
    with pytest.raises(UserError, match="not empty"):
        making.make(copy.folder, copy.exercises)


def test_wrong_phases_and_folders(tmp_path: Path) -> None:
    assert [one.id[:2] for one in of_phases("2, 04-05")] == sorted(
        one.id[:2] for one in of_phases("02,4,5")
    )
    for text in ("x", "5-", "77", ""):
        with pytest.raises(UserError, match="--phases is"):
            of_phases(text)
    with pytest.raises(UserError, match="no working copy"):
        making.opened(tmp_path)
    with pytest.raises(UserError, match="in the course's own checkout"):
        making.make(making.ROOT / "build" / "copy", exercises())


def test_traps_are_found_by_their_test() -> None:
    phase = next(phase for phase in PHASES if phase.number == 5)
    assert "given back twice" in trap_of(phase, "test_allocator_counts_users")
    assert trap_of(phase, "test_nothing") == ""


def test_every_trap_of_a_case_is_in_its_lesson() -> None:
    named = [(one, case.trap) for one in exercises() for case in one.cases if case.trap]
    lost = [(one.id, trap) for one, trap in named if not trap_with(one.phase, trap)]
    assert named and not lost, lost
