"""The front page: its numbers, its comparison with others, and its pictures come from files."""

from __future__ import annotations

from pathlib import Path

from benchmarks import front
from benchmarks.evidence import ROOT, Evidence
from benchmarks.numbers import GENERATED, NUMBER, QUOTED, UNIT, WORKED
from benchmarks.recorded_peers import beside, versus

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_number_of_the_front_page_is_typed_by_hand() -> None:
    bare = PAGE
    for pattern in (GENERATED, WORKED, NUMBER, QUOTED):
        bare = pattern.sub("~", bare)
    assert [found[0] for found in UNIT.finditer(bare)] == []


def test_the_bars_are_the_tables_rates(tmp_path: Path) -> None:
    front.bars(tmp_path / "front.svg")
    assert (tmp_path / "front.svg").read_text(encoding="utf-8").startswith("<?xml")
    evidence = Evidence.load(front.NINE)
    for workload, _, metric in front.WORKLOADS:
        others = beside(evidence, model=front.MODEL, workload=workload)
        ours = evidence.one(evidence.phase, workload, model=front.MODEL).median(metric)
        best = max(run.median(metric) for run in others)
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {workload} | {front.MODEL} |")]
        assert row.endswith(f"| {ours:,.0f} | {versus(ours, best)} |")
    small = front._small_print(evidence, [run.variant for run in others])
    for said in ("NVIDIA H200", front.MODEL, evidence.git["commit"][:8], evidence.when[:10], "2026-11-21"):
        assert said in small, f"the picture does not say {said}"
