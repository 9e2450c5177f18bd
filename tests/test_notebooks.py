"""The notebooks as files: complete, clean, run in order. `pytest --nbval` compares their outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phases import PHASES, ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"/(?:home|Users|root|tmp|work|usr)/|[A-Z]:\\\\|site-packages")
WARM_UP = "00_triton_warmup"
"""Belongs to no phase: what lesson 06 takes for granted."""


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def test_every_phase_has_one() -> None:
    assert [path.stem for path in NOTEBOOKS] == [WARM_UP, *(phase.name for phase in PHASES)]


def test_the_warm_up_is_named_before_it_is_needed() -> None:
    lesson = (ROOT / "phases" / "06_triton_paged_attention" / "README.md").read_text(
        encoding="utf-8"
    )
    assert 0 < lesson.find(f"{WARM_UP}.ipynb") < lesson.index("**Online softmax.**")


def test_the_list_names_every_notebook() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"({path.name})" not in text] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_format_and_metadata(self, path: Path) -> None:
        notebook = read(path)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        # A version or an editor's state would change with every machine that saves the file.
        assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
        assert set(notebook["metadata"]["language_info"]) == {"name"}
        assert all(cell["metadata"] == {} for cell in notebook["cells"])

    def test_was_run_from_top_to_bottom_without_errors(self, path: Path) -> None:
        cells = code_cells(path)
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert [
            o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"
        ] == []

    def test_every_print_has_its_output(self, path: Path) -> None:
        silent = [
            c["id"]
            for c in code_cells(path)
            if re.search(r"^print\(", "".join(c["source"]), re.M)
        ]
        assert (
            silent
            and [c["id"] for c in code_cells(path) if c["id"] in silent and not c["outputs"]]
            == []
        )

    def test_times_are_not_compared(self, path: Path) -> None:
        for cell in code_cells(path):
            source = "".join(cell["source"])
            if re.search(r"itl_ms|ttft_ms|perf_counter|\.arrival", source):
                assert source.startswith("# NBVAL_IGNORE_OUTPUT"), cell["id"]

    def test_has_an_experiment(self, path: Path) -> None:
        """A prediction is asked for in front of a cell that draws what comes out."""
        cells = read(path)["cells"]
        drawn = [
            at for at, cell in enumerate(cells) if "image/png" in str(cell.get("outputs"))
        ]
        assert drawn, "no plot"
        before = [
            "".join(cell["source"]) for at in drawn for cell in cells[max(0, at - 2) : at]
        ]
        assert any("**Predict" in text for text in before), "no prediction in front of a plot"

    def test_every_section_predicts_runs_and_explains(self, path: Path) -> None:
        """A reader guesses before the code runs, and reads why it came out so behind it."""
        titles: list[str] = []
        asks: set[str] = set()
        runs: set[str] = set()
        explains: set[str] = set()
        for cell in read(path)["cells"]:
            source = "".join(cell["source"])
            if "## Exercises" in source:
                break
            if cell["cell_type"] == "code":
                runs |= set(titles[-1:])
                continue
            before, *sections = re.split(r"^## ", source, flags=re.MULTILINE)
            if titles and titles[-1] in runs and before.strip():
                explains.add(titles[-1])
            if "**Predict" in before:
                asks |= set(titles[-1:])
            for section in sections:
                titles.append(section.splitlines()[0])
                if "**Predict" in section:
                    asks.add(titles[-1])
        assert sorted(runs - asks) == [], "sections that ask for no prediction"
        assert sorted(runs - explains) == [], "sections that explain nothing behind their code"

    def test_names_no_machine(self, path: Path) -> None:
        assert MACHINE.search(path.read_text(encoding="utf-8")) is None

    def test_exercises_come_last_and_fold_their_hints(self, path: Path) -> None:
        cells = read(path)["cells"]
        at = [i for i, cell in enumerate(cells) if "## Exercises" in "".join(cell["source"])]
        assert len(at) == 1
        rest = cells[at[0] :]
        assert [cell["cell_type"] for cell in rest] == ["markdown", "code"] * (len(rest) // 2)
        assert 2 <= len(rest) // 2 <= 3
        assert all("<details>" in "".join(cell["source"]) for cell in rest[::2])

    def test_exercises_are_not_answered(self, path: Path) -> None:
        """An answer is asked for by a name that is None, and the cell says that it has none yet."""
        for cell in code_cells(path):
            source = "".join(cell["source"])
            if "not answered yet" in source:
                assert re.match(r"\w+ = None  # ", source), f"{cell['id']} is answered"
                said = ["".join(output.get("text", "")) for output in cell["outputs"]]
                assert said == ["not answered yet\n"], cell["id"]
