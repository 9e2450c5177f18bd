"""What the texts say in words about numbers is what the evidence says."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.evidence import results
from phases import PHASES

LESSONS = [phase.folder / "README.md" for phase in PHASES]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.parent.name)
def test_what_others_published_has_its_source(lesson: Path) -> None:
    for paragraph in lesson.read_text(encoding="utf-8").split("\n\n"):
        if re.search(r"[Pp]ublished (for|a|by|\d)|[Pp]ublished (comparison|number|table)", paragraph):
            assert "](http" in paragraph, f"no source: {paragraph}"


CEILINGS = ("read_bytes_per_s", "matmul_flop_per_s")


def test_a_machine_has_one_ceiling() -> None:
    """Ceilings belong to a machine, not to a run: two files of one machine differ by 10 % at most."""
    for folder, found in results().items():
        for one, other in combinations(
            [evidence for evidence in found.values() if evidence.machine["ceilings"]], 2
        ):
            if one.machine["name"] == other.machine["name"]:
                for name in CEILINGS:
                    pair = sorted(evidence.machine["ceilings"][name] for evidence in (one, other))
                    assert pair[1] <= 1.1 * pair[0], f"{folder}: {one.phase} and {other.phase}: {name} {pair}"
