"""Phase 03 against phase 02: what a shared pass over the weights is worth, and what a static batch wastes."""

from __future__ import annotations

from pathlib import Path

import batching
import kv_cache
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, Samples, alternate, time_generation, timer
from benchmarks.plotting import lines, panels, reference_line, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
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
    return collect(
        PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


class Bench:
    """One model and how its engines are measured."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.name = options.model or ""
        self.model = load_target(options)
        self.top = ceilings(options.device, options.dtype)

    def sizes(self) -> list[Run]:
        """As many equal requests as the batch has rows; phase 02 serves those of one size one by one."""
        device, quick = self.options.device, self.options.quick
        on_cpu = device.type == "cpu"
        prompt, output = (64, 16 if quick else 64) if on_cpu else (64, 128)
        sizes = SIZES.get(device.type, SIZES["cpu"])[: 3 if quick else None]
        shared = 4 if quick else 16 if on_cpu else 8
        works = {
            size: uniform(f"batch-{prompt}+{output}", size, prompt, output) for size in sizes
        }
        warm_up = uniform("warm-up", 1, prompt, 4)
        alone = kv_cache.load(self.model)
        before = alternate(
            {BEFORE: timer(alone, works[shared], device)},
            repeats=self.options.repeats,
            warm={BEFORE: lambda: time_generation(alone, warm_up, device)},
        )
        engines = {str(size): batching.load(self.model, batch_size=size) for size in sizes}
        samples = alternate(
            {
                str(size): timer(engines[str(size)], work, device)
                for size, work in works.items()
            },
            repeats=self.options.repeats,
        )
        return [
            self.summarize(BEFORE, works[shared], before[BEFORE], batch=1, requests=shared),
            *(
                self.summarize(PHASE, work, samples[str(size)], batch=size, requests=size)
                for size, work in works.items()
            ),
        ]

    def skewed(self) -> list[Run]:
        """Most outputs short, a few long, at batch size 16: plain, and with finished rows dropped."""
        name, batch = "skewed-outputs-small", 16
        work = workload(name)
        if self.options.quick:
            work = Workload(
                f"{name}[:16]",
                tuple(Item(i.prompt, i.max_tokens // 4 + 1) for i in work.items[:16]),
            )
        samples = alternate(
            {
                PHASE: lambda repeat: self.waste(work.cold(repeat), batch, compact=False),
                COMPACT: lambda repeat: self.waste(work.cold(repeat), batch, compact=True),
            },
            repeats=self.options.repeats,
            warm={variant: lambda: None for variant in (PHASE, COMPACT)},
        )
        return [
            self.summarize(variant, work, kept, batch=batch)
            for variant, kept in samples.items()
        ]

    def waste(self, work: Workload, batch: int, compact: bool) -> Sample:
        """Time the workload and count the computed positions that served no request."""
        engine = batching.load(self.model, batch_size=batch, compact=compact)
        sample = time_generation(engine, work, self.options.device)
        return {**sample, "wasted_fraction": engine.waste.fraction}

    def summarize(
        self, variant: str, work: Workload, samples: Samples, *, batch: int, **options: int
    ) -> Run:
        """Evidence of one variant; the roofline is that of a batch which is always full."""
        return summarize_generation(
            variant,
            work,
            samples,
            model=self.name,
            config=self.model.config,
            dtype=self.options.dtype,
            top=self.top,
            batch=batch,
            options=options,
        )


def draw(evidence: Evidence, out: Path) -> None:
    """Throughput over the number of requests in a batch, a panel a model."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    figure, panel = panels(len(models))
    for axes, model in zip(panel, models, strict=True):
        runs = [run for run in evidence.find(PHASE, model=model) if "requests" in run.options]
        lines(
            runs,
            x="requests",
            metric="output_tokens_per_s",
            axes=axes,
            log_x=True,
            log_y=True,
            roofline=True,
        )
        (alone,) = [
            run for run in evidence.find(BEFORE, model=model) if "requests" in run.options
        ]
        reference_line(axes, alone.median("output_tokens_per_s"), "one by one (phase 02)")
        most = max(runs, key=lambda run: run.options["requests"])
        gain = most.median("output_tokens_per_s") / alone.median("output_tokens_per_s")
        axes.set_title(
            f"{model}: {most.options['requests']} requests in a batch, {gain:.0f} times the tokens"
        )
    save(figure, out, evidence)
