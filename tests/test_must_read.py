"""A phase is read in one sitting: what its lesson says must be read is short, and is there."""

from __future__ import annotations

import re

import pytest

from phases import PHASES, Phase

MOST = 700
"""Lines."""


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_what_must_be_read_fits_into_one_sitting(phase: Phase) -> None:
    lesson = (phase.folder / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- must read -->(.*?)<!-- /must read -->", lesson, re.DOTALL)
    assert found, f"the lesson of {phase.name} does not say what must be read"
    first_cells = [line.split("|")[1] for line in found[1].splitlines() if line.startswith("| [")]
    files = [phase.folder / link for cell in first_cells for link in re.findall(r"\]\(([^)]+\.py)\)", cell)]
    assert files, f"the lesson of {phase.name} names no file that must be read"
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert sum(lines.values()) <= MOST, f"{sum(lines.values())} lines must be read in {phase.name}: {lines}"
