"""Phase 03 against phase 02: what a shared pass over the weights is worth, and what a static batch wastes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import batching
import benchmarks.bench
import kv_cache
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, uniform, workload

PHASE = "03_batching"
BEFORE = "02_kv_cache"
COMPACT = "03_batching+compact"
SIZES = {"cpu": (1, 4, 8, 16, 32), "cuda": (1, 8, 32, 128, 512)}


def run(options: BenchOptions) -> Evidence:
    """Equal requests at growing batch sizes; then outputs of unequal length, where the batch waits."""
    runs = []
    for target in targets(options, published=True):
        bench = Bench(target)
        runs += bench.sizes() + bench.skewed()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """Both phases over one model."""

    def sizes(self) -> list[Run]:
        """As many equal requests as the batch has rows; phase 02 serves those of one size one by one."""
        prompt, output = (64, 16 if self.quick else 64) if self.on_cpu else (64, 128)
        sizes = SIZES.get(self.device.type, SIZES["cpu"])[: 3 if self.quick else None]
        shared = 4 if self.quick else 16 if self.on_cpu else 8
        works = {
            size: uniform(f"batch-{prompt}+{output}", size, prompt, output) for size in sizes
        }
        alone = {BEFORE: kv_cache.load(self.model)}
        self.warm_up(alone, uniform("warm-up", 1, prompt, 4))
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
        """Most outputs short, a few long, at batch size 16: plain, and with finished rows dropped."""
        name, batch = "skewed-outputs-small", 16
        work = workload(name)
        if self.quick:
            items = [Item(item.prompt, item.max_tokens // 4 + 1) for item in work.items[:16]]
            work = replace(work, name=f"{name}[:16]", items=tuple(items))
        kinds = {PHASE: False, COMPACT: True}
        timed = {
            variant: partial(self.waste, work, batch, compact)
            for variant, compact in kinds.items()
        }
        return self.compare(timed, work, batch, warm={})

    def waste(self, work: Workload, batch: int, compact: bool, repeat: int) -> Sample:
        """Time the workload and count the computed positions that served no request."""
        engine = batching.load(self.model, batch_size=batch, compact=compact)
        sample = time_generation(engine, work.cold(repeat), self.device)
        return {**sample, "wasted_fraction": engine.waste.fraction}


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
