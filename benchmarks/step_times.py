"""When host and device work in a decode step, eagerly, in a graph, and overlapped: `ladder bench step_times`.

A profiler's trace of the same steps in three engines over the same kernels. A lane is busy where an operator,
a call of the driver or a range around a step runs (host), and where a kernel or a copy runs (device). The
profiler makes each of the host's calls some microseconds longer, so the picture shows proportions; for rates
see phase 09.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Metric, collect
from benchmarks.measure import Samples, summarize
from benchmarks.plotting import panels, save, tint
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target
from benchmarks.trace import Event, read_trace
from benchmarks.workloads import uniform
from common.errors import UserError
from continuous.stats import STEP
from phases.commands.profile import record

NAME = "step_times"
MODEL = "random:qwen3-0.6b"
VARIANTS = {
    "from Python": {"graphs": False, "overlap": False},
    "in a graph": {"graphs": True, "overlap": False},
    "in a graph, overlapped": {"graphs": True, "overlap": True},
}
"""What is drawn, and the options of phase 09 that make it."""
BATCH, CONTEXT, STEPS = 16, 128, 12
SHOWN = 4
"""Steps of a picture: those in the middle, when the first tokens' work is over."""
HOST = {"cpu_op", "cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
SAME = 2.0
"""Microseconds: shorter gaps between two pieces of work are not drawn."""


def run(options: BenchOptions) -> Evidence:
    """Trace each engine once. Raises `UserError` without a GPU: there is one lane then."""
    if options.device.type != "cuda":
        raise UserError("step_times needs a CUDA device: on a CPU there is no second lane")
    model = load_target(replace(options, model=options.model or MODEL))
    work = uniform("profile", BATCH, CONTEXT, STEPS + 2, 10_000)
    runs = []
    for variant, switches in VARIANTS.items():
        engine = engine_of("09", model, max_rows=BATCH, max_len=1024, cache_bytes=1 << 30, **switches)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            record(engine, work, model, path, STEPS)
            lanes = middle(read_trace(path))
        for lane, pieces in lanes.items():
            found = summarize(
                variant,
                work,
                Samples(kept=[{"busy_ms": sum(end - begin for begin, end in pieces)}]),
                model=options.model or MODEL,
                dtype=options.dtype,
                options={"lane": lane},
            )
            metrics = {
                "begin_ms": Metric(tuple(begin for begin, _ in pieces)),
                "end_ms": Metric(tuple(end for _, end in pieces)),
            }
            runs.append(replace(found, metrics={**found.metrics, **metrics}))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return collect(NAME, runs, options.device, ceilings(options.device, options.dtype).to_json())


def middle(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return when each lane is busy in the middle `SHOWN` decode steps, in milliseconds from their start.

    A step begins where the host begins to launch it.
    """
    ranges = [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)]
    steps = sorted(float(event["ts"]) for event in ranges if event["name"] == STEP + "decode")
    first = max(0, (len(steps) - SHOWN) // 2)
    begin, end = steps[first], steps[first + SHOWN]
    host = ranges + [event for event in events if event.get("cat") in HOST]
    device = [event for event in events if event.get("cat") in DEVICE]
    return {
        lane: [
            ((low - begin) / 1000, (high - begin) / 1000)
            for low, high in joined((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found)
            if low < end and high > begin
        ]
        for lane, found in (("host", host), ("device", device))
    }


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals in order; those less than `SAME` apart are one."""
    found: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1] + SAME:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def draw(evidence: Evidence, out: Path) -> None:
    """Draw one panel for each engine, all over the same axis of time: host above, device below."""
    figure, axes = panels(len(VARIANTS), rows=len(VARIANTS), height=1.5)
    figure.set_figwidth(8.0)
    longest = max(max(run.metrics["end_ms"].samples) for run in evidence.runs)
    for ax, variant in zip(axes, VARIANTS, strict=True):
        for run in evidence.find(variant):
            lane = str(run.options["lane"])
            pieces = zip(run.metrics["begin_ms"].samples, run.metrics["end_ms"].samples, strict=True)
            shade = "#882255" if lane == "device" else tint("#882255", 0.45)
            bars = [(begin, end - begin) for begin, end in pieces]
            ax.broken_barh(bars, (0 if lane == "device" else 1.1, 0.9), color=shade)
        ax.set_yticks([0.45, 1.55], ["device", "host"])
        ax.set_xlim(0, longest)
        ax.grid(visible=False)
        last = max(max(run.metrics["end_ms"].samples) for run in evidence.find(variant, lane="device"))
        ax.set_title(f"{SHOWN} steps {variant}: {last:.1f} ms")
    axes[-1].set_xlabel("milliseconds (under a profiler)")
    save(figure, out, evidence)
