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

import numpy as np

from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Metric
from benchmarks.measure import Samples, release_memory
from benchmarks.plotting import panels, save, tint
from benchmarks.profiler import record
from benchmarks.trace import DEVICE, LAUNCHES, Event, ranges, read_trace, span
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
HOST = {"cpu_op", *LAUNCHES}
WAITING = "Synchronize"
"""What is in the name of a call with which the host waits for the device."""

Busy = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""For each microsecond: whether a lane works."""


def run(options: BenchOptions) -> Evidence:
    """Trace each engine once. Raises `UserError` without a GPU: there is one lane then."""
    if options.device.type != "cuda":
        raise UserError("step_times needs a CUDA device: on a CPU there is no second lane")
    bench = Bench(replace(options, model=options.model or MODEL))
    work = uniform("profile", BATCH, CONTEXT, STEPS + 2, 10_000)
    runs = []
    for variant, switches in VARIANTS.items():
        engine = engine_of(
            "09", bench.model, max_rows=BATCH, max_len=1024, cache_bytes=1 << 30, **switches
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            record(engine, work, bench.model, path, STEPS)
            lanes = middle(read_trace(path))
        for lane, busy in lanes.items():
            found = bench.run_of(
                variant, work, Samples([{"busy_ms": busy.sum() / 1e3}]), lane=lane
            )
            begins, ends = (Metric(tuple(times)) for times in pieces(busy))
            metrics = {**found.metrics, "begin_ms": begins, "end_ms": ends}
            runs.append(replace(found, metrics=metrics))
        del engine
        release_memory(options.device)
    return evidence_of(NAME, runs, options)


def middle(events: Sequence[Event]) -> dict[str, Busy]:
    """Return in which microseconds of the middle `SHOWN` decode steps each lane is busy.

    A step begins where the host begins to launch it.
    """
    steps = ranges(events, STEP)
    starts = [span(step)[0] for step in steps if step["name"] == STEP + "decode"]
    first = max(0, (len(starts) - SHOWN) // 2)
    begin, end = starts[first], starts[first + SHOWN]

    def busy(found: Iterable[Event]) -> Busy:
        lane = np.zeros(round(end - begin), bool)
        for event in found:
            low, high = (max(0, round(at - begin)) for at in span(event))
            lane[low:high] = True
        return lane

    host = steps + [event for event in events if event.get("cat") in HOST]
    waits = [event for event in host if WAITING in str(event["name"])]
    device = busy(event for event in events if event.get("cat") in DEVICE)
    return {"host": busy(host) & ~busy(waits), "device": device}


def pieces(lane: Busy) -> tuple[list[float], list[float]]:
    """Return where each piece of work begins and where it ends, in milliseconds."""
    changes = np.flatnonzero(np.diff(lane, prepend=False, append=False)) / 1e3
    return changes[::2].tolist(), changes[1::2].tolist()


def draw(evidence: Evidence, out: Path) -> None:
    """Draw one panel for each engine, each over its own time: host above, device below."""
    figure, axes = panels(len(VARIANTS), rows=len(VARIANTS), height=1.5)
    figure.set_figwidth(8.0)
    for ax, variant in zip(axes, VARIANTS, strict=True):
        lanes = [evidence.one(variant, lane=lane) for lane in ("device", "host")]
        longest = max(max(run.metrics["end_ms"].samples) for run in lanes)
        for height, run in enumerate(lanes):
            times = zip(
                run.metrics["begin_ms"].samples, run.metrics["end_ms"].samples, strict=True
            )
            bars = [(begin, end - begin) for begin, end in times]
            shade = tint(COLOUR, 0.45 * height)
            ax.broken_barh(bars, (1.1 * height, 0.9), color=shade, linewidth=0)
        ax.set_yticks([0.45, 1.55], ["device", "host"])
        ax.set_xlim(0, longest)
        ax.grid(visible=False)
        busy = lanes[0].median("busy_ms") / longest
        ax.set_title(
            f"{SHOWN} steps {variant}: {longest:.1f} ms, the device works in {busy:.0%} of them"
        )
    axes[-1].set_xlabel("milliseconds (under a profiler)")
    save(figure, out, evidence)
