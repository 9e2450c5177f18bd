"""What a lesson says that a command or an example prints is what it prints, but for times and rates."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from phases import ROOT, find_phase
from tests.programs import environment

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.DOTALL)
MEASURED = re.compile(r"[\d,]+\.\d+(?!\d)(?! ?MiB)|\b[\d,]+(?= ms)")
PROMPTS = {
    "03": ["The sea is", "Two plus two is"],
    "04": ["The sea is", "Two plus two is"],
    "05": ["The sea is", "Water is"],
    "07": ["The sea is", "Two plus two is", "The capital of France is"],
}
COMMANDS = [
    ("01", "run 01 --chat"),
    ("02", "run 02 --chat"),
    ("03", "run 03 --prompts-file"),
    ("04", "run 04 --prompts-file"),
    ("05", "run 05 --prompts-file"),
    ("07", "run 07 --prompts-file"),
    ("09", "run 09 --prompt"),
    ("10", "run 10 --quantization int8"),
    ("11", "run 11 --chat"),
    ("12", "run 12 --prompt 'Is the sky blue?' --choice yes,no --trace"),
]


WHOLE = {"01", "02", "03", "05", "07", "10"}
"""Lessons whose block ends as the command does: with the tokens computed."""


def blocks(number: str) -> list[tuple[str, str]]:
    """The language and the text of every fenced block of a lesson."""
    phase = find_phase(number)
    assert phase is not None
    return BLOCK.findall((phase.folder / "README.md").read_text(encoding="utf-8"))


def after(number: str, begins: str) -> tuple[str, list[str]]:
    """The command of a lesson that begins so, and the lines of the block behind it."""
    found = blocks(number)
    commands = [re.sub(r"^(?:\.venv/bin/)?ladder ", "", text) for _, text in found]
    (at,) = (
        i
        for i, text in enumerate(commands)
        if text.startswith(begins) and "\n" not in text.strip()
    )
    return commands[at].strip(), found[at + 1][1].splitlines()


def plain(lines: list[str]) -> list[str]:
    """Lines without what was measured and without their spacing; empty ones left out."""
    kept = (" ".join(MEASURED.sub("#", line).split()) for line in lines)
    return [line for line in kept if line]


def missing(said: list[str], *streams: str) -> list[str]:
    """The lines that no stream has behind those that it has shown already."""
    left, gone = [plain(stream.splitlines()) for stream in streams], []
    for line in plain(said):
        stream = next((lines for lines in left if line in lines), None)
        if stream is None:
            gone.append(line)
        else:
            del stream[: stream.index(line) + 1]
    return gone


@pytest.mark.usefixtures("smollm2_folder")
@pytest.mark.parametrize(("number", "begins"), COMMANDS)
def test_a_command_prints_what_its_lesson_says(
    number: str, begins: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, said = after(number, begins)
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS.get(number, [])) + "\n", encoding="utf-8")
    printed = cli(*shlex.split(f"{command} --device cpu"))[1:]
    assert missing(said, *printed) == [], f"ladder {command} printed\n{printed[1]}{printed[0]}"
    assert number not in WHOLE or " tokens computed in " in said[-1], f"{number}: {said[-1]}"


@pytest.mark.usefixtures("smollm2_folder")
def test_heads_that_two_ranks_do_not_divide(cli: Any) -> None:
    command, said = after("14", "run 14 --tensor-parallel 3")
    printed = cli(*shlex.split(command.replace("parallel 3", "parallel 2")))[1:]
    assert missing(said, *printed) == [], printed


@pytest.mark.slow
def test_a_profile_has_the_kernels_that_lesson_06_shows(tmp_path: Path) -> None:
    """In a process of its own: Triton decides when it is imported whether its kernels are interpreted."""
    command, said = after("06", "profile 06")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "phases",
            *shlex.split(command),
            "--device",
            "cpu",
            "--output",
            str(tmp_path),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert missing(said, done.stdout) == [], done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_folder")
@pytest.mark.parametrize("number", ["04", "05", "06", "07", "08", "11", "12"])
def test_an_example_in_python_runs(number: str) -> None:
    """The last example of section 4, and what it prints where the lesson says that."""
    found = blocks(number)
    python = [(i, text) for i, (language, text) in enumerate(found) if language == "python"]
    at = max(i for i, text in python if not text.startswith("# ") and "import" in text)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(found[at][1], f"lesson {number}", "exec"), {})
    if number == "08":
        assert missing(found[at + 1][1].splitlines(), printed.getvalue()) == [], (
            printed.getvalue()
        )
