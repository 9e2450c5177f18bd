"""Reading a trace of PyTorch's profiler: which kernels ran in which step, how often and for how long.

The profiler writes Chrome's trace format: a list of events with a category, a start and a duration. A kernel
runs on the device when it gets to it, so its own time does not say which step it belongs to. What says so is
its launch: both carry the same correlation number, and the launch stands inside the range that the host put
around the step. All kernels of a graph share the number of the graph's one launch.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuous.stats import STEP

INTERPRETED = "triton: "
"""Begins the name of the range around a kernel that Triton's interpreter runs on the CPU."""
BETWEEN = "(Python, between operators)"
"""The row of a CPU's table for the time in which no operator ran."""
LAUNCHES = {"cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of events: calls of the driver, and what the device does."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One kernel of a table: all its calls together. `seconds` is the time of all calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class StepTable:
    """What the steps of one kind did.

    kind: "prefill" or "decode". steps: how many there were.
    wall: seconds, from the start of each step to the start of the next, together.
    busy: seconds of `wall` in which the device ran at least one kernel or copy; on a CPU, an operator.
    launches: kernels; on a CPU, operators that Python called. copies: copies and fills of device memory.
    rows: the longest time first. On a CPU a row's time is with the operators that it called.
    """

    kind: str
    steps: int
    wall: float
    busy: float
    launches: int
    copies: int
    rows: tuple[Row, ...]


def read_trace(path: Path) -> list[Event]:
    """The events of a gzipped trace that have a duration."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def ranges(events: Iterable[Event], prefix: str) -> list[Event]:
    """The ranges that a program has put around what it does and called so, in order."""
    found = [e for e in events if e.get("cat") == "user_annotation"]
    return sorted((e for e in found if str(e["name"]).startswith(prefix)), key=span)


def span(event: Event) -> tuple[float, float]:
    """When an event begins and ends, in microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def step_tables(events: Sequence[Event], *, on_device: bool) -> list[StepTable]:
    """One table for each kind of step, in the order in which the kinds first appear.

    on_device: kernels of a GPU; otherwise operators of the CPU.
    """
    steps = ranges(events, STEP)
    # A step lasts until the next one begins: what lies between two ranges is scheduling, which is part of it.
    ends = [span(step)[0] for step in steps[1:]] + [span(step)[1] for step in steps[-1:]]
    launched = list(_kernels(events) if on_device else _operators(events))
    tables = []
    for name in dict.fromkeys(step["name"] for step in steps):
        mine = [
            (step["ts"], end)
            for step, end in zip(steps, ends, strict=True)
            if step["name"] == name
        ]
        pieces = [
            event for at, event in launched if any(low <= at < high for low, high in mine)
        ]
        wall = 1e-6 * sum(high - low for low, high in mine)
        busy = 1e-6 * _covered(map(span, pieces))
        calls: dict[str, list[float]] = defaultdict(list)
        for event in pieces:
            calls[short_name(event["name"]) if on_device else event["name"]].append(
                event["dur"]
            )
        rows = [Row(kernel, len(times), 1e-6 * sum(times)) for kernel, times in calls.items()]
        if not on_device:
            rows.append(Row(BETWEEN, 0, wall - busy))
        rows.sort(key=lambda row: -row.seconds)
        copies = sum(event["cat"] in DEVICE - {"kernel"} for event in pieces)
        kind, launches = name.removeprefix(STEP), len(pieces) - copies
        tables.append(StepTable(kind, len(mine), wall, busy, launches, copies, tuple(rows)))
    return tables


def _kernels(events: Iterable[Event]) -> Iterator[tuple[float, Event]]:
    """Every kernel and copy, with the time of its launch."""

    def number(event: Event) -> Any:
        return event.get("args", {}).get("correlation")

    launches = {number(event): event["ts"] for event in events if event.get("cat") in LAUNCHES}
    for event in events:
        if event.get("cat") in DEVICE:
            yield span(event | {"ts": launches.get(number(event), event["ts"])})[0], event


def _operators(events: Iterable[Event]) -> Iterator[tuple[float, Event]]:
    """Every operator and interpreted kernel that Python called, and none that these called."""
    called = [event for event in events if event.get("cat") == "cpu_op"]
    ends: dict[Any, float] = {}
    for event in sorted(
        called + ranges(events, INTERPRETED), key=lambda event: (event["ts"], -event["dur"])
    ):
        thread = event.get("tid")
        if event["ts"] >= ends.get(thread, 0.0):
            ends[thread] = span(event)[1]
            yield event["ts"], event


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


_SCOPES = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\b(?:\w+::)+")
# Arguments repeat the template's parameters, so the last name that matches is the innermost one.
_DETAIL = re.compile(
    r"\b\w*(?:[Ff]unctor\w*|_kernel_cuda|_kernel_impl|Ops)\b|\b(?:cutlass|cudnn)_\w+"
)
_DULL = re.compile(r"^gpu_kernel_impl|^(?:Unary|Binary)Functor$|^ReduceOps$")
LONGEST_NAME = 56


def short_name(name: str) -> str:
    """A kernel's name without types and namespaces: `vectorized_elementwise_kernel: CUDAFunctor_add`.

    C++ kernels are templates, and what they compute stands among the arguments: the last functor there is
    kept. Names of Triton's kernels and of cuBLAS's `nvjet` stay as they are; long ones are cut.
    """
    head = (
        name.removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .replace("<unnamed>::", "")
    )
    if head.startswith(("Memcpy", "Memset")):
        return head
    base = re.split(r"[<(]", head, maxsplit=1)[0]
    inside = head[len(base) :]
    base = _SCOPES.sub("", base).strip()
    details = [found for found in _DETAIL.findall(inside) if not _DULL.match(found)]
    if details:
        base = details[-1] if base == "Kernel2" else f"{base}: {details[-1]}"
    return base if len(base) <= LONGEST_NAME else base[: LONGEST_NAME - 1] + "…"
