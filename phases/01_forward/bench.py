"""Phase 01: what it costs to compute everything again for each token."""

from __future__ import annotations

import benchmarks.bench
import forward
from benchmarks.evidence import Run
from benchmarks.measure import growth
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import uniform

PHASE = "01_forward"
POINTS = (25, 50, 100, 200)
"""Generated tokens at which the rate so far is recorded."""


class Bench(benchmarks.bench.Bench):
    """Benchmark of phase 01's loop, which computes the whole sequence again for each token."""

    phase = PHASE
    published = True

    def measured(self) -> list[Run]:
        """Return a `Run` (a result) for each length in `POINTS`: tokens a second of a generation up to it."""
        points = POINTS[: 2 if self.quick else None]
        work = uniform(f"generate-{points[-1]}", 1, 16, points[-1])
        return [
            self.run_of(
                PHASE,
                uniform(work.name, 1, 16, count),
                samples,
                1,
                cached=False,
                generated=count,
                prompt=16,
            )
            for count, samples in growth(forward.load(self.model), work, points).items()
        ]


run = Bench.run
draw = figure(
    Panel("Tokens a second up to a length, as the text grows", x="generated", by="{model}")
)
