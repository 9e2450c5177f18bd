"""The whole ladder on one workload: `ladder bench ladder`, and one figure for each device.

Each phase's own benchmark compares it with the phase before it on the work that the phase is about. This one
asks what the climb is worth in all. Every phase gets the same requests, all from the start, and each engine
has what the one before it has, and nothing else but its own phase: so phases 07 and 08 have the kernels of 06
here. Once more from phase 06 on with the features of the appendix. Phases that are about other things than
this work (a shared prefix, a grammar, a server) change little, and the figure shows that, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import release_memory
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, workload
from common.events import Streams
from forward.model import Model
from paged_cache import PagedSizes, Recipe, build
from phases import PHASES, Phase
from phases.registry import import_phase, missing_for
from triton_paged_attention import Kernels

NAME = "ladder"
METRIC = "output_tokens_per_s"
ROWS = 4
BLOCKS = 5
KERNELS = 6
GRAPHS = 9
LAST = 13
"""First phases with rows of requests, with blocks, with kernels, and with them among their own features; the
last phase: those above it are about several engines or several devices."""
SLOW = 2
"""The last phase that serves one request at a time. All before blocks are measured once."""


def run(options: BenchOptions) -> Evidence:
    """Serve the workload with every phase, one phase after the other: on a GPU each wants all the memory."""
    runs: list[Run] = []
    for target in targets(options):
        bench = Bench(target)
        work = work_for(target)
        for phase in PHASES[:LAST]:
            if missing_for(phase, options.device):
                continue
            for variant, engine in engines(phase, bench.model, len(work.items)):
                runs += measure(bench, phase, variant, engine, work)
                del engine
                release_memory(options.device)
    return evidence_of(NAME, runs, options)


def work_for(options: BenchOptions) -> Workload:
    """The requests; on a GPU 64 with an eighth of their tokens: slow phases take minutes else."""
    work = workload("offline-256-small")
    if options.device.type == "cuda":
        some = workload("offline-256").first(64)
        items = [Item(i.prompt[: len(i.prompt) // 8], i.max_tokens // 8) for i in some.items]
        work = replace(some, name=f"{some.name}/8", items=tuple(items))
    return work.first(2, tokens=4) if options.quick else work


def engines(phase: Phase, model: Model, rows: int) -> Iterator[tuple[str, Streams]]:
    """A phase's engine with all phases below it, and from 06 on another with the appendix."""
    sizes: dict[str, Any] = {"max_rows": rows, "max_len": 1024}
    if phase.number < ROWS:
        sizes = {"batch_size": rows} if phase.number > SLOW else {}
    if KERNELS < phase.number < GRAPHS and model.device.type == "cuda":
        features = (Kernels(), *(kind() for kind in import_phase(phase).PRESET.on))
        yield phase.name, build(Recipe(model, PagedSizes(**sizes), features))
        return
    if phase.number < BLOCKS:
        yield phase.name, import_phase(phase).load(model, **sizes)
        return
    yield phase.name, engine_of(phase.name, model, **sizes)
    if phase.number == KERNELS or phase.number >= GRAPHS:
        yield phase.name + APPENDIX, engine_of(phase.name + APPENDIX, model, **sizes)


def measure(
    bench: Bench, phase: Phase, variant: str, engine: Streams, work: Workload
) -> list[Run]:
    """Samples of one engine, after one short request."""
    bench.warm_up({variant: engine}, work.cold(99).first(1, tokens=4))
    timed = {variant: bench.timer(engine, work)}
    repeats = 1 if phase.number < BLOCKS else bench.options.repeats
    rows = 1 if phase.number <= SLOW else len(work.items)
    return bench.compare(timed, work, rows, repeats=repeats, warm={}, cached=phase.number > 1)


def draw(evidence: Evidence, out: Path) -> None:
    """Draw a bar a phase, and a second panel of those with the appendix."""
    title = "Each phase with all below it, the same requests for all ({workload})"
    figure(
        Panel(title, METRIC, {"variant": "!*appendix"}),
        Panel("The same with the appendix", METRIC, {"variant": "*appendix"}),
        rows=2,
        height=3.3,
    )(evidence, out)
