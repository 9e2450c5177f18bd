"""Phase 14: a model split over ranks against one that is whole.

On a CPU two processes share two cores, so splitting gains nothing there and shows what it costs. On GPUs of
one host: the workloads that peers are measured by, for each number of ranks there is, and sums by size and
way.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

import parallel
from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Samples
from benchmarks.plotting import Panel, figure
from benchmarks.sums import times
from benchmarks.workloads import Workload, uniform, workload

PHASE, BEFORE = "14_parallel", "13_serving"
SUMS = "all-reduce"
BYTES = (8 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 64 << 20)
WORK = {"single": "single-512", "offline": "offline-256", "prefill": "prefill-64x1024"}
SMALL = {"single": (1, 16, 32), "offline": (8, 16, 16), "prefill": (8, 96, 1)}
HIDDEN = 4096
GPU: dict[str, Any] = {"max_rows": 256, "max_len": 4160, "step_tokens": 16_384}
CPU: dict[str, Any] = {"max_rows": 8, "max_len": 160, "cache_bytes": 8 << 20}


def run(options: BenchOptions) -> Evidence:
    """Sums over ranks and every workload, for each number of ranks: as many as GPUs, or two of a CPU.

    Each engine has a process of its own, which takes what NCCL keeps with it when it ends.
    """
    cuda = options.device.type == "cuda"
    options = replace(
        options, model=options.model or f"random:{'qwen3-8b' if cuda else 'tiny-window'}"
    )
    most = torch.cuda.device_count() if cuda else 2
    runs: list[Run] = []
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    for ranks, ending in product(counts, ("", APPENDIX)):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            runs += pool.submit(measure, options, ranks, ending).result()
    return evidence_of(PHASE, runs, options)


def measure(options: BenchOptions, ranks: int, ending: str) -> list[Run]:
    """Time sums over `ranks` ranks, then all workloads with one engine.

    ending: of the engine's name, see `engine_of`; with the appendix, sums are by its own kernel.
    """
    bench = Bench(options)
    bench.ending = ending
    ways = ("gloo", "") if bench.on_cpu else ("nccl", "one-shot")
    way = ways[bool(ending)]
    runs = sums(bench, ranks, way) if ranks > 1 and way else []
    given: dict[str, Any] = {
        "device": options.device.type,
        "dtype": bench.dtype_name,
        "prefix_cache": False,
        "drafter": "none",  # what random weights say repeats itself, by chance, for some ranks
        **(CPU if bench.on_cpu else GPU),
        **({"tensor_parallel": ranks} if ranks > 1 else {}),
    }
    variant = PHASE if ranks > 1 else BEFORE
    engine: Any = engine_of(variant + ending, bench.name, **given)
    for part in WORK:
        work = work_of(part, options)
        timed = {variant: bench.timer(engine, work)}
        runs += bench.compare(timed, work, tries=2, ranks=ranks, part=part)
    if ranks > 1:
        engine.loop.close()
    return runs


def sums(bench: Bench, ranks: int, way: str) -> list[Run]:
    """Time a sum over `ranks` ranks by a way, such as NCCL, in microseconds, for each number of bytes."""
    sizes = BYTES[: 2 if bench.quick else 4 if bench.on_cpu else None]
    kind, runs = bench.device.type, []
    found = parallel.together(ranks, times, way, list(sizes), HIDDEN, device=kind)[0]
    for size, microseconds in found.items():
        said = {"ranks": ranks, "way": way, "bytes": size, "hidden": HIDDEN}
        work = uniform(SUMS, 1, 1, 1, seed=size)
        samples = Samples([{"all_reduce_us": each} for each in microseconds])
        runs.append(bench.run_of(PHASE, work, samples, **said))
    return runs


def work_of(part: str, options: BenchOptions) -> Workload:
    """Return the workload of `part`, a key of `WORK`; a small one on a CPU or with `options.quick`."""
    if options.device.type == "cuda" and not options.quick:
        return workload(WORK[part])
    requests, prompt, output = SMALL[part]
    name = f"uniform-{requests}x{prompt}x{output}"
    return uniform(name, requests, prompt, output, vocab=250)


draw = figure(
    Panel(
        "Scaling",
        "output_tokens_per_s",
        {"part": "?*", "variant": "!*appendix"},
        x="ranks",
        by="{part}",
        relative=True,
    ),
    Panel("A sum over ranks", "all_reduce_us", x="bytes", by="{way}, {ranks} ranks", log="xy"),
)
