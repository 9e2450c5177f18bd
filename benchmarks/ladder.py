"""The whole ladder on one workload: `ladder bench ladder`, and one figure for all devices.

Each phase's own benchmark compares it with the phase before it on the work that the phase is about. This one
asks what the climb is worth in all: every phase that runs here serves the same requests, which are all there
from the start. The two phases that serve one request at a time get the first few of them, under a name that
says so. Phases that are about other things than this work (a shared prefix, a grammar, a server)
change little here, and the figure shows that, too.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import alternate, time_generation
from benchmarks.plotting import PHASE_COLOURS, number, panels, points, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Item, Workload, workload
from common.events import Streams
from forward.model import Model
from phases import PHASES, Phase
from phases.registry import load_engine, missing_for

NAME = "ladder"
METRIC = "output_tokens_per_s"
LAST = 13
"""The last phase: those above it are about several engines or several devices."""
SMALL_BATCH = {"01_forward": 2, "02_kv_cache": 4}
"""Requests that the slow phases get."""


def run(options: BenchOptions) -> Evidence:
    """Serve the workload with every phase, one phase after the other: on a GPU each wants all the memory."""
    runs: list[Run] = []
    for target in targets(options):
        model = load_target(target)
        for phase in PHASES[:LAST]:
            if not missing_for(phase, options.device):
                runs.append(_measure(phase, model, _work_for(phase, target), target))
                gc.collect()
                if options.device.type == "cuda":
                    torch.cuda.empty_cache()
    return collect(
        NAME, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


def _work_for(phase: Phase, options: BenchOptions) -> Workload:
    on_gpu = options.device.type == "cuda"
    whole = (
        shortened(workload("offline-256").first(64))
        if on_gpu
        else workload("offline-256-small")
    )
    return whole.first(2 if options.quick else SMALL_BATCH.get(phase.name, len(whole.items)))


def shortened(work: Workload) -> Workload:
    """Return the requests with a quarter of their prompts and outputs: the slow phases take minutes else."""
    items = tuple(
        Item(item.prompt[: len(item.prompt) // 4], item.max_tokens // 4) for item in work.items
    )
    return replace(work, name=f"{work.name}/4", items=items)


def _measure(phase: Phase, model: Model, work: Workload, options: BenchOptions) -> Run:
    engine = load_engine(phase, model, **_engine_options(phase, work))

    def sample(repeat: int) -> dict[str, float]:
        return time_generation(engine, work.cold(repeat), options.device)

    def warm(engine: Streams = engine) -> None:
        time_generation(engine, work.cold(99).first(1), options.device)

    samples = alternate(
        {phase.name: sample}, options.repeats, warm={phase.name: warm}, log=print
    )[phase.name]
    return summarize_generation(
        phase.name,
        work,
        samples,
        model=options.model or "",
        config=model.config,
        dtype=options.dtype,
        top=ceilings(options.device, options.dtype),
        batch=len(work.items),
    )


def _engine_options(phase: Phase, work: Workload) -> dict[str, Any]:
    """As many requests at a time as there are; everything else is the phase's default."""
    if phase.number <= 2:
        return {}
    if phase.number == 3:
        return {"batch_size": len(work.items)}
    return {"max_rows": len(work.items), "max_len": 1024}


def draw(evidence: Evidence, out: Path) -> None:
    """Draw a point a phase: the output tokens a second of the same requests."""
    figure, (axes,) = panels(1, height=4.0)
    rates = [run.median(METRIC) for run in evidence.runs]
    names = [run.variant for run in evidence.runs]
    points(axes, rates, names, [number(rate) for rate in rates], PHASE_COLOURS[3])
    axes.set_xlabel("output tokens per second")
    best = max(rates)
    axes.set_title(
        f"{names[rates.index(best)]} makes {best / rates[0]:,.0f} times the tokens of {names[0]}"
    )
    save(figure, out, evidence)
