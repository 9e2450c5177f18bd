"""Phase 09 against phase 08 with phase 06's kernels, and both beside the engines that this course explains.

One engine is built for each model. Its variants share the scheduler, the cache and the kernels, and differ in
what launches them: graphs or Python, ahead of the results or behind them. Then the published workloads once
more with the appendix, by this phase and by what `ladder serve` starts, which guesses tokens as well.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.compiled import Compiled
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, SERVED, BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate, neighbours, release_memory
from benchmarks.published import PUBLISHED, SIZES, draw_beside_peers
from benchmarks.replay import time_replay
from benchmarks.workloads import Workload, uniform, workload
from chunked_prefill import Chunked
from common.errors import UserError
from common.roofline import time_call
from common.sampling.metadata import SamplingFlags
from continuous.seams import SequentialLoop
from cuda_graphs import Graphs, Overlap, OverlappedLoop
from cuda_graphs.executors import DecodeGraphExecutor
from cuda_graphs.runner import GraphRunner
from paged_cache import PagedEngine, PagedRunner, PagedSizes, Recipe, build
from prefix_cache import Prefix

PHASE, BEFORE = "09_cuda_graphs", "08_prefix_cache, kernels of 06"
NO_OVERLAP, NO_GRAPHS = f"{PHASE}, no overlap", f"{PHASE}, no graphs"
COMPILED, TORCH = f"{PHASE}, torch.compile", "08_prefix_cache"
VARIANTS = {
    BEFORE: (False, False),
    NO_GRAPHS: (False, True),
    NO_OVERLAP: (True, False),
    PHASE: (True, True),
}
"""Graphs, overlap."""
MODELS = ("random:qwen3-0.6b", "random:qwen3-8b")
FORMATS: dict[str, dict[str, str]] = {
    PHASE: {},
    "10_quant int8": {"quantization": "int8"},
    "10_quant int4": {"quantization": "int4", "head": "int4"},
}
"""Of weights, on a CPU."""
CACHE_TOKENS = 200_000
"""More than any workload has at a time: there is room for two engines with an 8B."""


def run(options: BenchOptions) -> Evidence:
    """Measure throughput, latency, startup, the host time that overlap hides, and timed arrivals."""
    if options.device.type == "cpu":
        target = replace(options, model=options.model or "smollm2", dtype=torch.bfloat16)
        return evidence_of(PHASE, on_cpu(benchmarks.bench.Bench(target)), options)
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but phase 09 is measured on 'cuda' and 'cpu' only"
        )
    runs: list[Run] = []
    names = [options.model] if options.model else MODELS
    for name in names:
        bench = Bench(replace(options, model=name))
        runs += bench.throughput() + bench.overlap() + bench.startup()
        if name == MODELS[0]:
            runs += bench.serving() + bench.compiled() + bench.without_kernels()
        del bench
        release_memory(options.device)
        runs += with_appendix(benchmarks.bench.Bench(replace(options, model=name)))
        release_memory(options.device)
    return evidence_of(PHASE, runs, options)


def with_appendix(bench: benchmarks.bench.Bench) -> list[Run]:
    """Time the published workloads by this phase and by the engine that is served, in turn."""
    sizes = {**SIZES, "cache_bytes": bench.kv_bytes(CACHE_TOKENS)}
    engines = {
        name: engine_of(name, bench.model, **sizes) for name in (PHASE + APPENDIX, SERVED)
    }
    return [run for name in PUBLISHED for run in bench.race(engines, workload(name))]


def on_cpu(bench: benchmarks.bench.Bench) -> list[Run]:
    """Measure steps on a CPU: one call a step (the appendix's `cpu_step`) against PyTorch calls from Python.

    In bfloat16 and with weights of 8 and 4 bits: one request, alone and beside a busy program.
    """
    sizes: dict[str, Any] = {"max_rows": 16, "max_len": 1024, "cache_bytes": 1 << 28}
    engines = {TORCH: engine_of(TORCH, bench.model, **sizes)}
    for name, kind in FORMATS.items():
        for variant in (name, name + APPENDIX):
            engines[variant] = engine_of(variant, bench.model, **kind, **sizes)
    single = workload("single-512-small")
    runs = bench.race(engines, single)
    with neighbours(1):
        return runs + bench.race(engines, single, beside=True, neighbours=1)


class Bench(benchmarks.bench.Bench):
    """One model, and the engines of phases 08 and 09 that are measured with it."""

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        self.base = engine_of(
            PHASE, self.model, **SIZES, cache_bytes=self.kv_bytes(CACHE_TOKENS)
        )
        assert isinstance(self.base.runner, GraphRunner)
        self.graphs: GraphRunner = self.base.runner
        self.eager = PagedRunner(
            self.graphs.model,
            self.graphs.attention,
            self.graphs.rows,
            self.graphs.cache,
        )
        self.shift = 0

    def engine(self, variant: str) -> PagedEngine:
        """Return the engine of a variant, a key of `VARIANTS` (with or without graphs and overlap).

        The engines of all variants share one scheduler and cache.
        """
        graphs, overlap = VARIANTS[variant]
        runner: PagedRunner = self.graphs if graphs else self.eager
        loop = OverlappedLoop() if overlap else SequentialLoop()
        return PagedEngine(self.base.scheduler, runner, loop=loop)

    def cold(self, work: Workload) -> Workload:
        """Return the workload with token ids that no earlier run had: the variants share a prefix cache."""
        self.shift += 1
        return work.cold(self.shift)

    # What is measured.

    def throughput(self) -> list[Run]:
        """Measure the three published workloads: one by all variants, two slow ones by fewer."""
        many = [BEFORE, NO_OVERLAP, PHASE] if self.name == MODELS[0] else [NO_OVERLAP, PHASE]
        shown = {
            "single-512": [*VARIANTS],
            "offline-256": many,
            "prefill-64x1024": [BEFORE, PHASE],
        }
        runs: list[Run] = []
        for name, variants in shown.items():
            runs += self.race({each: self.engine(each) for each in variants}, workload(name))
        return runs

    def overlap(self) -> list[Run]:
        """Measure a step's microseconds on host and device, and the share of the host's that is hidden."""
        rows, steps = (8, 8) if self.quick else (SIZES["max_rows"], 60)
        runs = []
        for count in dict.fromkeys((1, rows)):
            work = uniform(f"decode-{count}x600", count, 600, 2 * steps)
            variants = {
                name: partial(self.steps, name, work, steps) for name in (NO_OVERLAP, PHASE)
            }
            kept = alternate(variants, self.options.repeats)
            serial = median(sample["wall_us_per_step"] for sample in kept[NO_OVERLAP].kept)
            device = median(sample["device_us_per_step"] for sample in kept[NO_OVERLAP].kept)
            for sample in kept[PHASE].kept:
                waits = max(0.0, sample["wall_us_per_step"] - sample["device_us_per_step"])
                sample["host_us_per_step"] = serial - device
                sample["hidden_fraction"] = 1 - waits / (serial - device)
            runs += [
                self.run_of(name, work, samples, running=count)
                for name, samples in kept.items()
            ]
        return runs

    def steps(self, variant: str, work: Workload, steps: int, repeat: int) -> Sample:
        """Measure the wall and device time of a decode step, in microseconds, in the middle of a run.

        work: requests that all decode at once. steps: number of steps that are timed. repeat: not read.
        """
        engine, cold = self.engine(variant), self.cold(work)
        for prompt, params in zip(cold.prompts, cold.params, strict=True):
            engine.add(prompt, params)
        engine.process_inbox()
        while engine.scheduler.waiting or any(
            request.prefilling for request in engine.scheduler.running
        ):
            engine.step()
        for _ in range(5):
            engine.step()
        graph = self.graphs.executor(DecodeGraphExecutor).graphs[
            len(work.items), SamplingFlags(0)
        ]

        def device() -> float:
            """Return the device time of a step, in microseconds: its graph replayed again and again.

            Each replay reads and writes what the one before it did.
            """
            replays = [graph.replay] * 10
            (seconds,) = time_call(
                lambda: [replay() for replay in replays], self.device, repeats=1, floor=0.0
            )
            return seconds * 1e5

        before = device()
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        per_step = (time.perf_counter() - started) / steps * 1e6
        on_device = (before + device()) / 2  # contexts grow meanwhile
        for request in [*engine.scheduler.running]:
            engine.abort(request)
        while not engine.idle:
            engine.step()
        return {"wall_us_per_step": per_step, "device_us_per_step": on_device}

    def startup(self) -> list[Run]:
        """Report the number of graphs, and the seconds and bytes of capturing them, compilation included."""
        took = self.graphs.startup
        sample = {
            "startup_seconds": took.seconds,
            "graphs": float(took.graphs),
            "graph_bytes": float(took.bytes),
            "reserved_bytes": float(self.base.memory_plan.reserved),
        }
        return [self.run_of(PHASE, uniform("startup", 1, 1, 1), Samples([sample]))]

    def serving(self) -> list[Run]:
        """Measure long prompts among short ones that arrive over time, in steps of at most 512 tokens."""
        work = self.short(workload("chunked_prefill"))
        scheduler: Any = self.base.scheduler
        before = scheduler.step_tokens, scheduler.chunk_tokens
        scheduler.step_tokens = scheduler.chunk_tokens = 512
        names = (BEFORE, NO_OVERLAP, PHASE)
        for name in names:  # eager kernels are compiled when first met
            self.replayed(name, work.first(8), 0)
        made = {name: partial(self.replayed, name, work) for name in names}
        runs = self.compare(made, work, repeats=1, warm={}, budget=512)
        scheduler.step_tokens, scheduler.chunk_tokens = before
        return runs

    def replayed(self, variant: str, work: Workload, repeat: int) -> Sample:
        """Measure a variant in one replay of a workload's arrivals.

        repeat: not read.
        """
        return time_replay(self.engine(variant), self.cold(work), self.device)[0]

    def compiled(self) -> list[Run]:
        """Measure `torch.compile` in place of phase 06's kernels for small operators, in graphs as well."""
        sizes = PagedSizes(**{**SIZES, "max_rows": 16}, cache_bytes=1 << 33)
        features = (Compiled(), Chunked(), Prefix(), Graphs(graph_tokens=0), Overlap())
        engine = build(Recipe(self.model, sizes, features))
        return self.race({COMPILED: engine}, workload("single-512"))

    def without_kernels(self) -> list[Run]:
        """Measure phase 08 with PyTorch's operators instead of Triton kernels, for one request."""
        engine = engine_of(TORCH, self.model, max_len=SIZES["max_len"], cache_bytes=1 << 31)
        return self.race({TORCH: engine}, workload("single-512"))


draw = draw_beside_peers
