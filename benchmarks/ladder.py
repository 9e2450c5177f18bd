"""The whole ladder on one workload: `ladder bench ladder`.

Each phase's own benchmark compares it with the phase before it on the work that the phase is about. This one
asks what the climb is worth in all: every phase that runs here serves the same requests, all there from the
start. On a GPU the two phases that serve one request at a time, and the one that pads, get the first few
requests alone, under a name that says so: the rest would take hours.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import alternate, time_generation
from benchmarks.plotting import bars, panels, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, workload
from common.events import Streams
from forward.model import Model
from phases import PHASES, Phase
from phases.registry import load_engine, missing_for

NAME = "ladder"
FEW = {"01_forward": 2, "02_kv_cache": 4, "03_batching": 64}
"""How many requests of the large workload the slow phases get."""


def run(options: BenchOptions) -> Evidence:
    """Serve the workload with every phase, one phase after the other: on a GPU each wants all the memory."""
    runs: list[Run] = []
    for target in targets(options):
        model = load_target(target)
        for phase in PHASES:
            if not missing_for(phase, options.device):
                runs.append(_measure(phase, model, _work_for(phase, target), target))
                gc.collect()
                if options.device.type == "cuda":
                    torch.cuda.empty_cache()
    return collect(NAME, runs, options.device, ceilings(options.device, options.dtype).to_json())


def _work_for(phase: Phase, options: BenchOptions) -> Workload:
    if options.device.type != "cuda":
        whole = workload("offline-256-small")
        return whole.first(4) if options.quick else whole
    whole = workload("offline-256")
    if options.quick:
        return whole.first(2)
    return whole.first(FEW[phase.name]) if phase.name in FEW else whole


def _measure(phase: Phase, model: Model, work: Workload, options: BenchOptions) -> Run:
    engine = load_engine(phase, model, **_engine_options(phase, work))
    repeats = 1 if phase.name == "01_forward" else options.repeats

    def sample(repeat: int) -> dict[str, float]:
        return time_generation(engine, work.cold(repeat), options.device)

    def warm(engine: Streams = engine) -> None:
        time_generation(engine, work.cold(99).first(1), options.device)

    samples = alternate({phase.name: sample}, repeats, warm={phase.name: warm})[phase.name]
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
    """As many requests at a time as there are, up to 256; everything else is the phase's default."""
    if phase.number <= 2:
        return {}
    rows = min(len(work.items), 256)
    if phase.number == 3:
        return {"batch_size": rows}
    return {"max_rows": rows, "max_len": 2048}


def draw(evidence: Evidence, out: Path) -> None:
    """One bar a phase, for each model."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    figure, axes = panels(len(models), height=1.4 + 0.42 * len(PHASES))
    for model, place in zip(models, axes, strict=True):
        bars(evidence.find(model=model), "output_tokens_per_s", axes=place, label=lambda run: run.variant)
        runs = evidence.find(model=model)
        rates = [run.median("output_tokens_per_s") for run in runs]
        place.set_title(f"{model}, {runs[-1].workload}: {rates[-1] / rates[0]:,.0f} times from first to last")
    save(figure, out, evidence)
