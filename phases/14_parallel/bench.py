"""Phase 14: a model split over ranks against one that is whole.

On a CPU two processes share two cores, so splitting gains nothing there and shows what it costs. On GPUs of
one host: the workloads that peers are measured by, for each number of ranks there is, and sums by size and
way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

import parallel
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run, sample_metrics
from benchmarks.measure import alternate, summarize, timer
from benchmarks.plotting import MARKERS, colours, lines, over_one, panels, save
from benchmarks.sums import WAYS, times
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

    Each number has a process of its own, which takes what NCCL keeps with it when it ends.
    """
    cuda = options.device.type == "cuda"
    options = replace(
        options, model=options.model or f"random:{'qwen3-8b' if cuda else 'tiny-window'}"
    )
    most = torch.cuda.device_count() if cuda else 2
    runs: list[Run] = []
    for ranks in (count for count in (1, 2, 4, 8) if count <= most):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            runs += pool.submit(measure, options, ranks).result()
    return evidence_of(PHASE, runs, options, "all")


def measure(options: BenchOptions, ranks: int) -> list[Run]:
    """Sums by each way, then the workloads with one engine."""
    runs = sums(options, ranks) if ranks > 1 else []
    given: dict[str, Any] = {
        "device": options.device.type,
        "dtype": str(options.dtype).removeprefix("torch."),
        "prefix_cache": False,
        "drafter": "none",  # what random weights say repeats itself, by chance, for some ranks
        **(GPU if options.device.type == "cuda" else CPU),
        **({"tensor_parallel": ranks} if ranks > 1 else {}),
    }
    variant = PHASE if ranks > 1 else BEFORE
    engine: Any = engine_of(variant + APPENDIX, options.model, **given)
    for part in WORK:
        work = work_of(part, options)
        timed = {variant: timer(engine, work, options.device)}
        kept = alternate(timed, options.repeats, tries=2)[variant]
        facts: dict[str, Any] = {"ranks": ranks, "part": part}
        about: dict[str, Any] = {
            "model": options.model,
            "dtype": options.dtype,
            "options": facts,
        }
        runs.append(summarize(variant, work, kept, **about))
    if ranks > 1:
        engine.loop.close()
    return runs


def sums(options: BenchOptions, ranks: int) -> list[Run]:
    """Microseconds of a sum over ranks, by way and bytes."""
    cuda = options.device.type == "cuda"
    sizes = BYTES if cuda else BYTES[:2] if options.quick else BYTES[:4]
    runs = []
    for way in WAYS if cuda else ("gloo",):
        found = parallel.together(
            ranks, times, way, list(sizes), HIDDEN, device=options.device.type
        )[0]
        for size, microseconds in found.items():
            said = {"ranks": ranks, "way": way, "bytes": size, "hidden": HIDDEN}
            runs.append(fact(options, SUMS, {"all_reduce_us": microseconds}, said))
    return runs


def fact(
    options: BenchOptions,
    name: str,
    samples: Mapping[str, list[float]],
    said: Mapping[str, Any],
) -> Run:
    """Evidence that is not of a workload, but of what is `said` of it."""
    model = (options.model or "").removeprefix("random:")
    dtype = str(options.dtype).removeprefix("torch.")
    sha = hashlib.sha256(json.dumps([name, model, dict(said)]).encode()).hexdigest()
    (metric,) = samples
    metrics = sample_metrics([{metric: value} for value in samples[metric]])
    return Run(PHASE, name, sha, model, "random", dtype, metrics, said)


def work_of(part: str, options: BenchOptions) -> Workload:
    """The workload of a part; a small one for two cores."""
    if options.device.type == "cuda" and not options.quick:
        return workload(WORK[part])
    requests, prompt, output = SMALL[part]
    name = f"uniform-{requests}x{prompt}x{output}"
    return uniform(name, requests, prompt, output, vocab=250)


def draw(evidence: Evidence, out: Path) -> None:
    """Scaling over ranks, and sums by size."""
    figure, (scaling, sizes) = panels(2, height=3.3)
    draw_scaling(scaling, [run for run in evidence.runs if run.options.get("part") in WORK])
    lines(
        evidence.find(workload=SUMS),
        x="bytes",
        metric="all_reduce_us",
        axes=sizes,
        by=lambda run: f"{run.options['way']}, {run.options['ranks']} ranks",
        log_x=True,
        log_y=True,
        phase=PHASE,
    )
    sizes.set_xticks(BYTES, ["8 K", "64 K", "512 K", "2 M", "8 M", "64 M"])
    sizes.set_ylabel("microseconds")
    sizes.set_title("A sum over ranks")
    save(figure, out, evidence)


def draw_scaling(axes: Axes, runs: list[Run]) -> None:
    """Draw each part's rate over that of one rank, and the most that could be."""
    shown = colours(WORK, PHASE)
    counts: list[int] = []
    for part, marker in zip(WORK, MARKERS, strict=False):
        metric = "prompt_tokens_per_s" if part == "prefill" else "output_tokens_per_s"
        found = {
            run.options["ranks"]: run.median(metric)
            for run in runs
            if run.options["part"] == part and metric in run.metrics
        }
        counts = sorted(found)
        gains = [found[count] / found[1] for count in counts]
        axes.plot(counts, gains, marker=marker, color=shown[part], label=part)
    over_one(axes, counts, "rank")
    axes.set_xlabel("ranks")
    axes.set_title("Scaling")
