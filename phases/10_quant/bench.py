"""Phase 10 against phase 09: fewer bits, and how much faster. `benchmarks/quality.py` has what they cost."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import alternate_engines, summarize
from benchmarks.plotting import bars, panels, save, times
from benchmarks.recorded_peers import beside
from benchmarks.targets import load_target
from benchmarks.workloads import Workload, uniform, workload
from paged_cache import PagedEngine

PHASE, BEFORE = "10_quant", "09_cuda_graphs"
SCHEMES_ON_CPU = ("int8", "w8a8", "int4")
SCHEMES_ON_GPU = ("fp8", "int4")
SMALL_HEAD = f"{PHASE} int4, int4 head"


def run(options: BenchOptions) -> Evidence:
    """On a CPU the speed of the small model; on a GPU that of large ones."""
    runs: list[Run] = []
    if options.device.type == "cuda":
        names = [options.model] if options.model else ["random:qwen3-8b", "random:qwen3-0.6b"]
        for name in names:
            runs += on_gpu(replace(options, model=name))
            torch.cuda.empty_cache()
    else:
        runs += on_cpu(replace(options, model=options.model or "smollm2"))
    return evidence_of(PHASE, runs, options)


def on_cpu(options: BenchOptions) -> list[Run]:
    """One request, and 16 at a time."""
    model = load_target(options)
    sizes = {"max_rows": 16, "max_len": 512}
    engines = {name: engine_of(name, model, **sizes) for name in (BEFORE, BEFORE + APPENDIX)}
    for scheme, ending in product(SCHEMES_ON_CPU, ("", APPENDIX)):
        name = f"{PHASE} {scheme}{ending}"
        engines[name] = engine_of(name, model, quantization=scheme, **sizes)
    runs = []
    for batch, output in ((1, 48), (16, 16)):
        work = uniform(
            f"decode-{batch}x32+{output}", batch, 32, 4 if options.quick else output
        )
        runs += timed(engines, work, options, {"batch": batch})
    long = uniform("prompt-1x384", 1, 64 if options.quick else 384, 1)
    return runs + timed(engines, long, options, {"batch": 1})


def on_gpu(options: BenchOptions) -> list[Run]:
    """The published workloads, on one engine after the other: each fills a good part of the memory."""
    model = load_target(options)
    sizes = {"max_rows": 256, "max_len": 4096, "step_tokens": 16_384}
    ways: dict[str, dict[str, Any]] = {BEFORE: {}}
    ways |= {f"{PHASE} {scheme}": {"quantization": scheme} for scheme in SCHEMES_ON_GPU}
    keys = {"quantization": "fp8", "kv_cache": "fp8", "block_size": 128}
    ways |= {f"{PHASE} fp8, fp8 keys": keys}
    ways |= {SMALL_HEAD: {"quantization": "int4", "head": "int4"}}
    runs = []
    for (way, given), ending in product(ways.items(), ("", APPENDIX)):
        variant = way + ending
        engines = {variant: engine_of(variant, model, **(sizes | given))}
        alone = way == SMALL_HEAD  # many requests read a head as fast as one does
        for name in ("single-512", *(() if alone else ("offline-256", "prefill-64x1024"))):
            work = workload(name)
            if options.quick:
                work = work.first(8, tokens=8)
            runs += timed(engines, work, options, {})
        del engines
        gc.collect()
        torch.cuda.empty_cache()
    return runs


def timed(
    engines: dict[str, PagedEngine],
    work: Workload,
    options: BenchOptions,
    facts: dict[str, Any],
) -> list[Run]:
    """Every engine on one workload, in alternating order, after a few tokens of the same requests."""
    kept = alternate_engines(engines, work, device=options.device, repeats=options.repeats)
    for name, found in kept.items():
        for sample in found.kept:
            sample["weight_bytes"] = float(engines[name].memory_plan.weights)
    about: dict[str, Any] = {"model": options.model or "", "dtype": options.dtype}
    return [
        summarize(name, work, found, options=facts, **about) for name, found in kept.items()
    ]


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """A panel of bars for each model and workload."""
    shown = dict.fromkeys((run.model, run.workload) for run in evidence.runs)
    figure, axes = panels(len(shown), rows=2 if len(shown) > 3 else 1)
    for place, (model, work) in zip(axes, shown, strict=False):
        found = evidence.find(model=model, workload=work)
        metric = _metric(work)
        bars(
            [*found, *beside(evidence, model=model, workload=work)],
            metric,
            axes=place,
            gain=False,
            label=label,
        )
        before = evidence.one(BEFORE, work, model=model).median(metric)
        best = max(
            (run for run in found if run.variant.startswith(PHASE)),
            key=lambda run: run.median(metric),
        )
        factor = times(best.median(metric) / before)
        place.set_title(f"{model}, {work}: {label(best)} is best, {factor} phase 09")
    save(figure, out, evidence)


def _metric(work: str) -> str:
    """What a workload is about."""
    return "prompt_tokens_per_s" if work.startswith("pr") else "output_tokens_per_s"


def label(run: Run) -> str:
    """A variant's name, short."""
    return run.variant.replace(f"{PHASE} ", "")
