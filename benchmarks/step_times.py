"""When host and device work in a decode step, eagerly, in a graph, and overlapped: `ladder bench step_times`.

A profiler's trace of the same steps in three engines over the same kernels. A lane is busy where an operator,
a call of the driver or a range around a step runs and does not wait for the device (host), and where a kernel
or a copy runs (device). The profiler makes each of the host's calls some microseconds longer, so the picture
shows proportions; for rates see phase 09.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Metric, collect
from benchmarks.measure import Samples, release_memory, summarize
from benchmarks.plotting import panels, save, tint
from benchmarks.profiler import record
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target
from benchmarks.trace import Event, read_trace
from benchmarks.workloads import uniform
from common.errors import UserError
from continuous.stats import STEP

NAME = "step_times"
MODEL = "random:qwen3-0.6b"
VARIANTS = {
    "from Python": {"graphs": False, "overlap": False},
    "in a graph": {"graphs": True, "overlap": False},
    "in a graph, overlapped": {"graphs": True, "overlap": True},
}
"""What is drawn, and the options of phase 09 that make it."""
BATCH = 16
CONTEXT = 128
STEPS = 12
COLOUR = "#882255"
"""Phase 09's."""
SHOWN = 4
"""Steps of a picture: those in the middle, when the first tokens' work is over."""
HOST = {"cpu_op", "cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
WAITING = "Synchronize"
"""What is in the name of a call with which the host waits for the device."""
SAME = 2.0
"""Microseconds: shorter gaps between two pieces of work are not drawn."""

Interval = tuple[float, float]


def run(options: BenchOptions) -> Evidence:
    """Trace each engine once. Raises `UserError` without a GPU: there is one lane then."""
    if options.device.type != "cuda":
        raise UserError("step_times needs a CUDA device: on a CPU there is no second lane")
    model = load_target(replace(options, model=options.model or MODEL))
    work = uniform("profile", BATCH, CONTEXT, STEPS + 2, 10_000)
    runs = []
    for variant, switches in VARIANTS.items():
        engine = engine_of(
            "09", model, max_rows=BATCH, max_len=1024, cache_bytes=1 << 30, **switches
        )
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
        release_memory(options.device)
    return collect(
        NAME, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


def middle(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """Return when each lane is busy in the middle `SHOWN` decode steps, in milliseconds from their start.

    A step begins where the host begins to launch it.
    """
    ranges = [
        e
        for e in events
        if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)
    ]
    steps = sorted(float(event["ts"]) for event in ranges if event["name"] == STEP + "decode")
    first = max(0, (len(steps) - SHOWN) // 2)
    begin, end = steps[first], steps[first + SHOWN]
    host = ranges + [event for event in events if event.get("cat") in HOST]
    waiting = joined(span(event) for event in host if WAITING in str(event["name"]))
    lanes = {
        "host": without(joined(map(span, host)), waiting),
        "device": joined(span(event) for event in events if event.get("cat") in DEVICE),
    }
    return {
        lane: [
            ((max(low, begin) - begin) / 1000, (min(high, end) - begin) / 1000)
            for low, high in found
            if low < end and high > begin
        ]
        for lane, found in lanes.items()
    }


def span(event: Event) -> Interval:
    """Return when an event begins and ends, in microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return what is left of intervals outside of holes; each list is in order and has no overlaps."""
    left: list[Interval] = []
    for low, high in intervals:
        for begin, end in holes:
            if begin < high and end > low:
                if begin > low:
                    left.append((low, begin))
                low = max(low, end)
        if low < high:
            left.append((low, high))
    return left


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals in order; those less than `SAME` apart are one."""
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1] + SAME:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def draw(evidence: Evidence, out: Path) -> None:
    """Draw one panel for each engine, each over its own time: host above, device below."""
    figure, axes = panels(len(VARIANTS), rows=len(VARIANTS), height=1.5)
    figure.set_figwidth(8.0)
    for ax, variant in zip(axes, VARIANTS, strict=True):
        lanes = {str(run.options["lane"]): run for run in evidence.find(variant)}
        longest = max(max(run.metrics["end_ms"].samples) for run in lanes.values())
        for height, lane in enumerate(("device", "host")):
            begins, ends = (
                lanes[lane].metrics[name].samples for name in ("begin_ms", "end_ms")
            )
            bars = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True)]
            shade = tint(COLOUR, 0.45) if height else COLOUR
            ax.broken_barh(bars, (1.1 * height, 0.9), color=shade, linewidth=0)
        ax.set_yticks([0.45, 1.55], ["device", "host"])
        ax.set_xlim(0, longest)
        ax.grid(visible=False)
        busy = lanes["device"].median("busy_ms") / longest
        ax.set_title(
            f"{SHOWN} steps {variant}: {longest:.1f} ms, the device works in {busy:.0%} of them"
        )
    axes[-1].set_xlabel("milliseconds (under a profiler)")
    save(figure, out, evidence)
