"""Phase 01: what it costs to compute everything again for each token."""

from __future__ import annotations

from pathlib import Path

import forward
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Samples, Watch, summarize
from benchmarks.plotting import lines, save
from benchmarks.roofline import ceilings, reached
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, uniform
from common.events import generate
from common.roofline import generation_work
from common.sampling.params import SamplingParams

PHASE = "01_forward"
POINTS = (25, 50, 100, 200)
"""Generated tokens at which the rate so far is recorded."""


def growth(
    variant: str,
    engine: forward.Generator,
    work: Workload,
    points: tuple[int, ...],
    options: BenchOptions,
) -> list[Run]:
    """Generate one long completion and report the mean rate up to each of ``points`` tokens.

    One run gives all points: how long the first 200 tokens took does not depend on what came later.
    """
    model, top = engine.model, ceilings(options.device, options.dtype)
    generate(engine, work.prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    with Watch() as watch:
        (completion,) = generate(engine, work.prompts, work.params)
    runs = []
    for count in points:
        seconds = completion.times[count - 1] - completion.arrival
        samples = Samples(
            [{"seconds": seconds, "output_tokens_per_s": count / seconds}], [watch.noise]
        )
        cached = variant != PHASE
        ideal = generation_work(
            model.config, options.dtype, work.prompt_lens, [count], batch=1, cached=cached
        )
        runs.append(
            summarize(
                variant,
                work,
                samples,
                model=options.model or "",
                dtype=options.dtype,
                options={"generated": count, "prompt": work.prompt_lens[0]},
                roofline=reached(ideal, top, samples),
            )
        )
    return runs


def run(options: BenchOptions) -> Evidence:
    """The rate of the naive loop as the sequence grows."""
    points = POINTS[:2] if options.quick else POINTS
    work = uniform(f"generate-{points[-1]}", 1, 16, points[-1])
    runs = []
    for target in targets(options, published=True):
        runs += growth(PHASE, forward.load(load_target(target)), work, points, target)
    return collect(
        PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


def draw(evidence: Evidence, out: Path) -> None:
    """The mean rate against the number of generated tokens, a line a model."""
    runs = evidence.find(PHASE)
    metric = "output_tokens_per_s"
    figure, axes = lines(
        runs, x="generated", metric=metric, by=lambda run: run.model, phase=PHASE
    )
    axes.set_xlabel("tokens generated")
    of = {
        model: evidence.find(PHASE, model=model)
        for model in dict.fromkeys(run.model for run in runs)
    }
    left = {
        model: found[-1].median(metric) / found[0].median(metric)
        for model, found in of.items()
    }
    first, last = runs[0].options["generated"], runs[-1].options["generated"]
    shares = ", ".join(f"{share:.0%} ({model})" for model, share in left.items())
    axes.set_title(
        f"After {last} tokens, the rate that was left of that after {first}: {shares}"
    )
    save(figure, out, evidence)
