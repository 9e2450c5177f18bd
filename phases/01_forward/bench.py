"""Phase 01: what it costs to compute everything again for each token."""

from __future__ import annotations

from pathlib import Path

import forward
from benchmarks.bench import Bench, evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import growth
from benchmarks.plotting import lines, save
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


def draw(evidence: Evidence, out: Path) -> None:
    """The mean rate against the number of generated tokens, a line a model."""
    runs = evidence.find(PHASE)
    metric = "output_tokens_per_s"
    figure, axes = lines(
        runs, x="generated", metric=metric, by=lambda run: run.model, phase=PHASE
    )
    axes.set_xlabel("tokens generated")
    of = {run.model: evidence.find(PHASE, model=run.model) for run in runs}
    shares = ", ".join(
        f"{found[-1].median(metric) / found[0].median(metric):.0%} ({model})"
        for model, found in of.items()
    )
    first, last = runs[0].options["generated"], runs[-1].options["generated"]
    axes.set_title(
        f"After {last} tokens, the rate that was left of that after {first}: {shares}"
    )
    save(figure, out, evidence)
