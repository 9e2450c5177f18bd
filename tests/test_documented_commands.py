"""Every `ladder ...` command in the Markdown files and notebooks is one that the command line takes."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import torch
import typer.main

from phases import EXTRAS, PHASES, find_phase, first_phases, registry
from phases.cli import WITH_ENGINE_FLAGS, app
from phases.commands import course  # noqa: F401  (the commands of `ladder course`)
from phases.commands.flags import add_engine_flags
from tests.test_links import sources

LINE = re.compile(r"^[ !$]*(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?ladder +([a-z][^\n]*)$", re.M)
INLINE = re.compile(r"`(?:\.venv/bin/)?ladder ([a-z][^`\n]*)`")
CPU = torch.device("cpu")


def documented() -> dict[str, str]:
    """Command line -> a file that it stands in."""
    found: dict[str, str] = {}
    for path in sources():
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            content = "\n".join(
                "".join(cell["source"]) for cell in json.loads(content)["cells"]
            )
        blocks = re.findall(r"^(?:```|~~~)\w*\n(.*?)^(?:```|~~~)", content, re.M | re.S)
        lines = [line for block in blocks for line in LINE.findall(block)]
        for line in lines + INLINE.findall(content):
            found.setdefault(line, path.name)
    return found


def check(line: str) -> None:
    """Raise for a command line that would not run; run nothing."""
    # In text a command may be named with placeholders for its arguments, or without them.
    line = re.split(r"\s[|>]\s", line)[0]  # what the shell does with the output
    words = [
        {"PHASE": "5", "NN": "5", "FILE": "f.yaml", "NAME": "quality"}.get(word, word)
        for word in shlex.split(line, comments=True)
    ]
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group), words)
    given = command.make_context(name, rest, resilient_parsing=not rest).params
    phase = given.get("phase")
    if phase is not None and phase not in EXTRAS:
        assert find_phase(phase), f"there is no phase {phase}"
    if name in WITH_ENGINE_FLAGS and phase is not None:
        first = first_phases()
        options = {
            key: value for key, value in given.items() if key in first and value is not None
        }
        registry.check_options(find_phase(phase), options, CPU)


@pytest.fixture(scope="module", autouse=True)
def flags() -> None:
    for name, command in WITH_ENGINE_FLAGS.items():
        add_engine_flags(command, server=name == "serve")


@pytest.mark.slow
def test_commands_in_the_documentation() -> None:
    found = documented()
    assert len(found) > 3 * len(PHASES), "the lessons' commands were not seen"
    wrong = {}
    for line, file in found.items():
        try:
            check(line)
        except Exception as error:
            wrong[f"{file}: ladder {line}"] = getattr(error, "message", None) or str(error)
    assert wrong == {}
