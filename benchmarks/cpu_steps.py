"""Phase 09 on a CPU: a step in one call (the appendix's `cpu_step`) against phase 08's operators from Python.

One request and four, alone and beside a busy program; bfloat16 and the dtype that was asked for, and
int8 weights. `ladder bench 09` is this where the device is a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, alternate, summarize, time_generation
from benchmarks.neighbours import neighbours
from benchmarks.plotting import bars, panels, save
from benchmarks.roofline import Ceilings, ceilings, summarize_generation
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, uniform, workload
from paged_cache import PagedEngine

PHASE, BEFORE = "09_cuda_graphs", "08_prefix_cache"
PLAIN = f"{PHASE}, no cpu_step"
MAX_LEN, ROWS = 1024, 16
TOGETHER, BESIDE = 4, 1
"""Requests at once, and programs beside one request."""
METRIC = "output_tokens_per_s"


def measured(options: BenchOptions) -> Evidence:
    """Each model in each format: one request, several, and one beside a busy program."""
    runs: list[Run] = []
    for target in targets(options):
        for dtype in dict.fromkeys((torch.bfloat16, options.dtype)):
            runs += measure(replace(target, dtype=dtype))
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


def measure(options: BenchOptions) -> list[Run]:
    """One model in one dtype."""
    model, top = load_target(options), ceilings(options.device, options.dtype)
    sizes: dict[str, Any] = {"max_rows": ROWS, "max_len": MAX_LEN, "cache_bytes": 1 << 28}
    engines = {
        BEFORE: engine_of("08", model, **sizes),
        PLAIN: engine_of("09", model, cpu_step=False, **sizes),
        PHASE: engine_of("09", model, **sizes),
    }
    if options.dtype == torch.bfloat16:
        for step in (False, True):
            name = f"{PHASE if step else PLAIN}, int8"
            engines[name] = engine_of("10", model, quantization="int8", cpu_step=step, **sizes)
    single = workload("single-512-small")
    together = uniform(f"decode-{TOGETHER}x32", TOGETHER, 32, 64)
    if options.quick:
        single = replace(single, name="single-quick", items=(replace(single.items[0], max_tokens=16),))
        together = uniform(f"decode-{TOGETHER}x8", TOGETHER, 8, 8)
    runs = compare(engines, single, options, model.config, top, 0)
    runs += compare(engines, together, options, model.config, top, 0)
    with neighbours(BESIDE):
        runs += compare(engines, single, options, model.config, top, BESIDE)
    return runs


def compare(
    engines: dict[str, PagedEngine],
    work: Workload,
    options: BenchOptions,
    config: Any,
    top: Ceilings,
    busy: int,
) -> list[Run]:
    """All engines on one workload in alternating order, with other tokens at every repeat."""
    shift = iter(range(1, 1000))

    def timed(engine: PagedEngine) -> Callable[[int], Sample]:
        return lambda repeat: time_generation(engine, work.cold(next(shift)), options.device)

    kept = alternate({name: timed(engine) for name, engine in engines.items()}, options.repeats, log=print)
    about: dict[str, Any] = {"model": options.model or "", "dtype": options.dtype}
    found = []
    for name, samples in kept.items():
        if busy:
            found.append(summarize(name, work, samples, options={"neighbours": busy}, **about))
        else:
            batch = len(work.items)
            found.append(
                summarize_generation(name, work, samples, config=config, top=top, batch=batch, **about)
            )
    return found


def draw(evidence: Evidence, out: Path) -> None:
    """A panel for one request, for several, and for one beside a busy program; bfloat16, the first model."""
    first = evidence.runs[0]
    runs = evidence.find(model=first.model, dtype=first.dtype)
    kinds = list(dict.fromkeys((run.workload, bool(run.options.get("neighbours"))) for run in runs))
    figure, axes = panels(len(kinds), height=3.8)
    for panel, (work, busy) in zip(axes, kinds, strict=True):
        shown = [run for run in runs if (run.workload, bool(run.options.get("neighbours"))) == (work, busy)]
        bars(shown, METRIC, axes=panel, gain=False, label=lambda run: run.variant.replace("_", " "))
        panel.set_title(f"{first.model}, {work}" + (", beside a busy program" if busy else ""))
    save(figure, out, evidence)
