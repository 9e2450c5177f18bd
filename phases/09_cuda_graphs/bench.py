"""Phase 09 against phase 08 with phase 06's kernels, and both beside the engines that this course explains.

One engine is built for each model. Its variants share the scheduler, the cache and the kernels, and differ in
what launches them: graphs or Python, ahead of the results or behind them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

import benchmarks.bench
import prefix_cache
from benchmarks import cpu_steps
from benchmarks.bench import evidence_of
from benchmarks.compiled import Compiled
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate, time_generation
from benchmarks.published import draw_beside_peers
from benchmarks.replay import time_replay
from benchmarks.workloads import Item, Workload, uniform, workload
from chunked_prefill import Chunked
from common.errors import UserError
from common.sampling.metadata import SamplingFlags
from continuous.seams import SequentialLoop
from cuda_graphs import Graphs, Overlap, OverlappedLoop
from cuda_graphs.executors import DecodeGraphExecutor
from cuda_graphs.runner import GraphRunner
from cuda_graphs.sampling import TritonSamplerBackend
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
STEP_TOKENS = 16_384
ROWS = 256
MAX_LEN = 4096
CACHE_TOKENS = 300_000


def run(options: BenchOptions) -> Evidence:
    """Throughput, latency, startup, what overlap hides, and serving by the clock."""
    if options.device.type == "cpu":
        return cpu_steps.measured(options)
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but phase 09 is measured on 'cuda' and 'cpu' only"
        )
    runs: list[Run] = []
    names = [options.model] if options.model else MODELS
    for name, ending in product(names, ("", APPENDIX)):
        bench = Bench(replace(options, model=name), ending)
        runs += bench.throughput() + bench.overlap() + bench.startup()
        if name == MODELS[0]:
            runs += bench.serving()
        if name == MODELS[0] and not ending:
            runs += bench.compiled() + bench.without_kernels()
        del bench
        torch.cuda.empty_cache()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """One model and the engines around it. ending: of all variants' names, `APPENDIX` or nothing."""

    def __init__(self, options: BenchOptions, ending: str) -> None:
        super().__init__(options)
        self.ending = ending
        started = time.perf_counter()
        self.base = self.load()
        self.load_seconds = time.perf_counter() - started
        assert isinstance(self.base.runner, GraphRunner)
        self.graphs: GraphRunner = self.base.runner
        self.eager = PagedRunner(
            self.graphs.model,
            self.graphs.attention,
            self.graphs.rows,
            self.graphs.cache,
            sampler_backend=TritonSamplerBackend(),
        )
        self.shift = 0

    def load(self, **more: Any) -> PagedEngine:
        """Return the phase's engine, with what the appendix adds to it."""
        given: dict[str, Any] = {
            "max_rows": ROWS,
            "max_len": MAX_LEN,
            "step_tokens": STEP_TOKENS,
        }
        tokens = self.kv_bytes(CACHE_TOKENS)
        return engine_of(
            PHASE + self.ending, self.model, **{**given, "cache_bytes": tokens, **more}
        )

    def engine(self, variant: str) -> PagedEngine:
        """A variant over the one scheduler and cache."""
        graphs, overlap = VARIANTS[variant]
        runner: PagedRunner = self.graphs if graphs else self.eager
        loop = OverlappedLoop() if overlap else SequentialLoop()
        return PagedEngine(self.base.scheduler, runner, loop=loop)

    def cold(self, work: Workload) -> Workload:
        """The workload with tokens that no run has seen: the variants share a prefix cache."""
        self.shift += 1
        return work.cold(self.shift)

    def run_of(
        self,
        variant: str,
        work: Workload,
        samples: Samples,
        roofline_batch: int = 0,
        **facts: Any,
    ) -> Run:
        """Evidence of a variant, whose name says whether the appendix is in it."""
        return super().run_of(variant + self.ending, work, samples, roofline_batch, **facts)

    # What is measured.

    def throughput(self) -> list[Run]:
        """The three published workloads."""
        runs: list[Run] = []
        for name in ("single-512", "offline-256", "prefill-64x1024"):
            work = workload(name)
            if self.quick:
                work = work.first(8, tokens=8)
            runs += self.together(work, self.variants(name))
        return runs

    def variants(self, name: str) -> list[str]:
        """All where they differ; fewer where a sample takes long and another workload has shown it."""
        if name == "single-512":
            return list(VARIANTS)
        if name == "prefill-64x1024":
            return [BEFORE, PHASE]
        return [BEFORE, NO_OVERLAP, PHASE] if self.name == MODELS[0] else [NO_OVERLAP, PHASE]

    def together(self, work: Workload, variants: Sequence[str]) -> list[Run]:
        """Variants on one workload, all requests at once."""
        engines = {name: self.engine(name) for name in variants}
        short = work.first(len(work.items), tokens=4)
        made = {
            name: partial(self.generation, engine, work) for name, engine in engines.items()
        }
        warm = {
            name: partial(self.generation, engine, short, 0)
            for name, engine in engines.items()
        }
        return self.compare(made, work, ROWS, warm=warm)

    def generation(self, engine: PagedEngine, work: Workload, repeat: int) -> Sample:
        """One sample."""
        return time_generation(engine, self.cold(work), self.device)

    def overlap(self) -> list[Run]:
        """What a step costs the host and the device, and how much of the host's time is hidden."""
        rows, steps = (8, 8) if self.quick else (ROWS, 60)
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
        """Wall and device time of decode steps in the middle of a run."""
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
            """A step again and again: it reads and writes what it read and wrote before."""
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e2

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
        """What capturing took, kernels compiled on the way included."""
        took = self.graphs.startup
        sample = {
            "startup_seconds": took.seconds,
            "load_seconds": self.load_seconds,
            "graphs": float(took.graphs),
            "graph_bytes": float(took.bytes),
            "reserved_bytes": float(self.base.memory_plan.reserved),
        }
        return [self.run_of(PHASE, uniform("startup", 1, 1, 1), Samples([sample]))]

    def serving(self) -> list[Run]:
        """Long prompts among short ones, as they arrive, in steps of 512 tokens."""
        work = workload("chunked_prefill")
        if self.quick:
            work = replace(
                work, items=tuple(Item(i.prompt, 4, i.arrival / 10) for i in work.items[:4])
            )
        scheduler: Any = self.base.scheduler
        before = scheduler.step_tokens, scheduler.chunk_tokens
        scheduler.step_tokens = scheduler.chunk_tokens = 512
        names = (BEFORE, NO_OVERLAP, PHASE)
        made = {name: partial(self.replayed, name, work) for name in names}
        # Each runs once before: eager kernels are compiled when first met.
        runs = self.compare(made, work, repeats=1, budget=512)
        scheduler.step_tokens, scheduler.chunk_tokens = before
        return runs

    def replayed(self, variant: str, work: Workload, repeat: int) -> Sample:
        """One replay of the arrivals."""
        return time_replay(self.engine(variant), self.cold(work), self.device)[0]

    def compiled(self) -> list[Run]:
        """`torch.compile` in the place of phase 06's small operators, in graphs as well."""
        started = time.perf_counter()
        sizes = PagedSizes(
            max_rows=16, max_len=MAX_LEN, step_tokens=STEP_TOKENS, cache_bytes=1 << 33
        )
        features = (Compiled(), Chunked(), Prefix(), Graphs(graph_tokens=0), Overlap())
        engine = build(Recipe(self.model, sizes, features))
        seconds = time.perf_counter() - started
        work = workload("single-512")
        timed = {COMPILED: partial(self.generation, engine, work)}
        kept = alternate(timed, self.options.repeats)[COMPILED]
        for sample in kept.kept:
            sample["startup_seconds"] = seconds
        return [self.run_of(COMPILED, work, kept, 1)]

    def without_kernels(self) -> list[Run]:
        """Phase 08 as it stands, for the whole way at batch 1."""
        engine = prefix_cache.load(self.model, max_len=MAX_LEN, cache_bytes=1 << 31)
        work = workload("single-512")
        return self.compare({TORCH: partial(self.generation, engine, work)}, work, repeats=1)


def draw(evidence: Evidence, out: Path) -> None:
    """The three workloads of every model: this phase, its variants, and other engines."""
    if evidence.machine["device"] == "cpu":
        return cpu_steps.draw(evidence, out)
    draw_beside_peers(evidence, out, PHASE, label)


def label(run: Run) -> str:
    """A variant's name, short."""
    return run.variant.replace(f"{PHASE}, ", "09, ").replace("08_prefix_cache, ", "08, ")
