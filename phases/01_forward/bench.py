"""Phase 01: what it costs to compute everything again for each token."""

from __future__ import annotations

import forward
from benchmarks.bench import Bench, evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import growth
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import uniform

PHASE = "01_forward"
POINTS = (25, 50, 100, 200)
"""Generated tokens at which the rate so far is recorded."""


def run(options: BenchOptions) -> Evidence:
    """The rate of the naive loop as the sequence grows."""
    points = POINTS[:2] if options.quick else POINTS
    work = uniform(f"generate-{points[-1]}", 1, 16, points[-1])
    runs: list[Run] = []
    for target in targets(options, published=True):
        bench = Bench(target)
        for count, samples in growth(forward.load(bench.model), work, points).items():
            part = uniform(work.name, 1, 16, count)
            found = bench.run_of(
                PHASE, part, samples, 1, cached=False, generated=count, prompt=16
            )
            runs.append(found)
    return evidence_of(PHASE, runs, options)


draw = figure(
    Panel("Tokens a second up to a length, as the text grows", x="generated", by="{model}")
)
