"""Phase 03 against phase 02: what a shared pass over the weights is worth, and what a static batch wastes."""

from __future__ import annotations

from functools import partial

import batching
import benchmarks.bench
import kv_cache
from benchmarks.evidence import Run
from benchmarks.measure import Sample, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import Workload, uniform, workload

PHASE = "03_batching"
BEFORE = "02_kv_cache"
COMPACT = "03_batching+compact"
SIZES = {"cpu": ((1, 4, 8, 16, 32), 16), "cuda": ((1, 8, 32, 128, 512), 8)}
"""Requests in a batch, and in which phase 02 is measured as well."""


class Bench(benchmarks.bench.Bench):
    """Benchmark of phases 02 and 03 with one model."""

    phase = PHASE
    published = True

    def measured(self) -> list[Run]:
        """Return the runs (results) of `sizes` and `skewed`."""
        return self.sizes() + self.skewed()

    def sizes(self) -> list[Run]:
        """Return runs (results) at growing batch sizes, each with as many equal requests as a batch has rows.

        One of these workloads is measured with phase 02 as well, which serves the requests one by one.
        """
        output = 64 if self.on_cpu else 128
        sizes, shared = SIZES["cpu" if self.on_cpu else "cuda"]
        works = {size: uniform(f"batch-64+{output}", size, 64, output) for size in sizes}
        if self.quick:
            works = {size: works[size].hurried() for size in (sizes[0], shared)}
        alone = {BEFORE: kv_cache.load(self.model)}
        self.warm_up(alone, uniform("warm-up", 1, 64, 4))
        timed = {BEFORE: self.timer(alone[BEFORE], works[shared])}
        runs = self.compare(timed, works[shared], 1, warm={}, requests=shared)
        samples = alternate(
            {
                str(size): self.timer(batching.load(self.model, batch_size=size), work)
                for size, work in works.items()
            },
            self.options.repeats,
        )
        return runs + [
            self.run_of(PHASE, work, samples[str(size)], size, requests=size)
            for size, work in works.items()
        ]

    def skewed(self) -> list[Run]:
        """Return runs (results) at batch size 16, outputs mostly short: plain, and dropping finished rows."""
        work, batch = self.short(workload("skewed-outputs-small")), 16
        timed = {
            variant: partial(self.waste, work, batch, compact)
            for variant, compact in {PHASE: False, COMPACT: True}.items()
        }
        return self.compare(timed, work, batch, warm={})

    def waste(self, work: Workload, batch: int, compact: bool, repeat: int) -> Sample:
        """Time a workload; return its sample (numbers by name), with a `wasted_fraction`.

        That is the share of computed token positions that served no request.

        compact: drop finished rows. repeat: number of the repetition, each of which has other prompts.
        """
        engine = batching.load(self.model, batch_size=batch, compact=compact)
        sample = time_generation(engine, work.cold(repeat), self.device)
        return {**sample, "wasted_fraction": engine.waste.fraction}


run = Bench.run
draw = figure(
    Panel(
        "{model}: more requests in a batch, more tokens a second",
        where={"variant": PHASE},
        x="requests",
        log="xy",
        over={"variant": BEFORE},
    ),
    each=("model",),
)
