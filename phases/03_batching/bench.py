"""Phase 03 against phase 02: what a shared pass over the weights is worth, and what a static batch wastes."""

from __future__ import annotations

from pathlib import Path

import batching
import kv_cache
from benchmarks.targets import load_target, targets
from common.evidence import BenchOptions, Evidence, Run, collect
from common.measure import Sample, Samples, alternate, summarize, time_generation, timer
from common.plotting import lines, save
from common.roofline import ceilings, generation_work, reached
from common.workloads import Item, Workload, uniform, workload

PHASE, BEFORE, COMPACT = "03_batching", "02_kv_cache", "03_batching+compact"
SIZES = {"cpu": (1, 4, 8, 16, 32), "cuda": (1, 8, 32, 128, 512)}


def run(options: BenchOptions) -> Evidence:
    """Equal requests at growing batch sizes; then outputs of unequal length, where the batch waits."""
    runs = []
    for target in targets(options, published=True):
        bench = Bench(target)
        runs += bench.sizes() + bench.skewed()
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


class Bench:
    """One model and how its engines are measured."""

    def __init__(self, options: BenchOptions) -> None:
        self.options, self.name, self.model = options, options.model or "", load_target(options)
        self.top = ceilings(options.device, options.dtype)

    def sizes(self) -> list[Run]:
        """As many equal requests as the batch has rows. Phase 02 serves a few of them one by one."""
        on_cpu = self.options.device.type == "cpu"
        prompt, output = (64, 64) if on_cpu else (64, 128)
        sizes = SIZES.get(self.options.device.type, SIZES["cpu"])[: 2 if self.options.quick else None]
        works = {size: uniform(f"batch-{prompt}+{output}", size, prompt, output) for size in sizes}
        alone = uniform(f"batch-{prompt}+{output}", 2, prompt, output)
        variants = {(BEFORE, 1): (kv_cache.load(self.model), alone)} | {
            (PHASE, size): (batching.load(self.model, batch_size=size), work) for size, work in works.items()
        }
        samples = alternate(
            {
                f"{variant} {size}": timer(engine, work, self.options.device)
                for (variant, size), (engine, work) in variants.items()
            },
            repeats=self.options.repeats,
        )
        return [
            self.summarize(variant, work, samples[f"{variant} {size}"], size)
            for (variant, size), (_, work) in variants.items()
        ]

    def skewed(self) -> list[Run]:
        """Most outputs short, a few long, at batch size 16: plain, and with finished rows dropped."""
        name = "skewed-outputs-small" if self.options.device.type == "cpu" else "skewed-outputs"
        work, batch = workload(name), 16
        if self.options.quick:
            work = Workload(
                f"{name}[:16]", tuple(Item(i.prompt, i.max_tokens // 4 + 1) for i in work.items[:16])
            )
        samples = alternate(
            {
                PHASE: lambda repeat: self.waste(work.cold(repeat), batch, compact=False),
                COMPACT: lambda repeat: self.waste(work.cold(repeat), batch, compact=True),
            },
            repeats=self.options.repeats,
            warm={variant: lambda: None for variant in (PHASE, COMPACT)},
        )
        return [self.summarize(variant, work, kept, batch) for variant, kept in samples.items()]

    def waste(self, work: Workload, batch: int, compact: bool) -> Sample:
        """Time the workload and count the computed positions that served nobody."""
        engine = batching.load(self.model, batch_size=batch, compact=compact)
        sample = time_generation(engine, work, self.options.device)
        return {**sample, "wasted_fraction": engine.waste.fraction}

    def summarize(self, variant: str, work: Workload, samples: Samples, batch: int) -> Run:
        """Evidence of one variant; the roofline is that of a batch which is always full."""
        ideal = generation_work(
            self.model.config, self.options.dtype, work.prompt_lens, work.output_lens, batch
        )
        return summarize(
            variant,
            work,
            samples,
            model=self.name,
            dtype=self.options.dtype,
            options={"batch": batch},
            roofline=reached(ideal, self.top, samples),
        )


def draw(evidence: Evidence, out: Path) -> None:
    """Throughput against batch size, with phase 02 as its starting point."""
    runs = [run for run in evidence.runs if run.workload.startswith("batch-")]
    figure, axes = lines(runs, x="batch", metric="output_tokens_per_s", log_x=True)
    axes.set_title("Batch size: one pass over the weights for everybody")
    save(figure, out, evidence)
