"""Phase 18 against phase 17: requests whose bits depend on their company, and what the mode costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate_engines, summarize
from benchmarks.plotting import bars, panels, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target
from benchmarks.workloads import Workload, workload
from common.events import Completion, generate
from forward.model import Model
from paged_cache import PagedEngine

PHASE = "18_batch_invariance"
BEFORE = "17_hybrid_cache"
MODELS = {"cpu": ("smollm2",), "cuda": ("random:qwen3-0.6b", "random:qwen3-8b")}
PUBLISHED = ("offline-256", "prefill-64x1024", "single-512")
VARIANTS = {BEFORE: {"batch_invariant": False}, PHASE: {"batch_invariant": True}}
SCHEDULES = ("alone again", "all at once", "in reverse", "small chunks", "drafts")
"""How the requests are served again; the first time each is served alone."""
OTHER_ENGINES: dict[str, dict[str, Any]] = {
    "small chunks": {"step_tokens": 64, "chunk_tokens": 24},
    "drafts": {"drafter": "ngram", "draft_adaptive": False},
}
"""Options of schedules that have an engine of their own."""


def run(options: BenchOptions) -> Evidence:
    """Count requests that differ between schedules, with the mode and without; on a GPU, time both."""
    models = MODELS[options.device.type] if options.model is None else (options.model,)
    runs: list[Run] = []
    for name in models:
        own = replace(options, model=name)
        model = load_target(own)
        runs += counted(own, name, model)
        if options.device.type == "cuda":
            runs += timed(own, name, model)
        del model
    return evidence_of(PHASE, runs, options)


def counted(options: BenchOptions, name: str, model: Model) -> list[Run]:
    """Serve the same requests by every schedule, and compare tokens and log-probabilities bit for bit."""
    on_cpu = options.device.type == "cpu"
    work = workload("offline-256-small" if on_cpu else "offline-256")
    work = work.first(6 if options.quick else 12 if on_cpu else 128, tokens=16)
    runs = []
    for variant, chosen in VARIANTS.items():
        engine = make(model, work, **chosen)
        alone = serve(engine, work, "alone")
        for schedule in SCHEDULES:
            if schedule in OTHER_ENGINES:
                engine = make(model, work, **chosen, **OTHER_ENGINES[schedule])
            found = serve(engine, work, schedule)
            sample: Sample = {
                "requests_with_other_tokens": float(
                    sum(a.token_ids != b.token_ids for a, b in zip(alone, found, strict=True))
                ),
                "requests_with_other_logprobs": float(
                    sum(a.logprobs != b.logprobs for a, b in zip(alone, found, strict=True))
                ),
            }
            runs.append(
                summarize(
                    variant,
                    work,
                    Samples([sample] * options.repeats),
                    model=name,
                    dtype=model.dtype,
                    options={"schedule": schedule, "requests": len(work.items)},
                )
            )
    return runs


def make(model: Model, work: Workload, **options: Any) -> PagedEngine:
    """Return an engine with rows for all requests of a workload."""
    longest = max(a + b for a, b in zip(work.prompt_lens, work.output_lens, strict=True))
    sizes = {"max_rows": len(work.items), "max_len": longest + 16}
    return engine_of("18", model, **{"drafter": "none", **sizes, **options})


def serve(engine: PagedEngine, work: Workload, schedule: str) -> list[Completion]:
    """Serve a workload with log-probabilities, and return its completions in its own order."""
    prompts = work.prompts
    params = [replace(each, logprobs=0) for each in work.params]
    order = range(len(prompts))[:: -1 if schedule == "in reverse" else 1]
    groups: Sequence[Sequence[int]] = [order]
    if schedule.startswith("alone"):
        groups = [[place] for place in order]
    found: dict[int, Completion] = {}
    for group in groups:
        done = generate(engine, [prompts[at] for at in group], [params[at] for at in group])
        found |= dict(zip(group, done, strict=True))
    return [found[at] for at in range(len(prompts))]


def timed(options: BenchOptions, name: str, model: Model) -> list[Run]:
    """Time the published workloads with the mode and without, in alternating order."""
    sizes: dict[str, Any] = {
        "max_rows": 256,
        "max_len": 4096,
        "step_tokens": 16_384,
        "drafter": "none",
        "gpu_memory_utilization": 0.4,
    }
    engines = {
        variant: engine_of("18", model, **sizes, **chosen)
        for variant, chosen in VARIANTS.items()
    }
    runs = []
    for load in PUBLISHED:
        work = workload(load)
        if options.quick:
            work = work.first(8, tokens=8)
        kept = alternate_engines(engines, work, device=options.device, repeats=options.repeats)
        runs += [
            summarize_generation(
                variant,
                work,
                kept[variant],
                model=name,
                config=model.config,
                dtype=model.dtype,
                top=ceilings(options.device, options.dtype),
                batch=len(work.items),
            )
            for variant in engines
        ]
    return runs


def draw(evidence: Evidence, out: Path) -> None:
    """Requests whose log-probabilities have other bits, for each schedule, with the mode and without."""
    model = evidence.runs[0].model
    runs = [run for run in evidence.runs if run.model == model and "schedule" in run.options]
    figure, (axes,) = panels(1)
    bars(
        runs,
        "requests_with_other_logprobs",
        axes=axes,
        label=lambda run: f"{run.variant}\n{run.options['schedule']}",
    )
    most = max(
        run.median("requests_with_other_logprobs") for run in runs if run.variant == PHASE
    )
    count = runs[0].options["requests"]
    axes.set_title(
        f"{model}: with the mode at most {most:.0f} of {count} requests have other bits than alone"
    )
    save(figure, out, evidence)
