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
from bisect import bisect_right
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
    rows: the longest time first. On a CPU a row's time leaves out the operators that it called.
    """

    kind: str
    steps: int
    wall: float
    busy: float
    launches: int
    copies: int
    rows: tuple[Row, ...]


def read_trace(path: Path) -> list[Event]:
    """The events of a trace, gzipped or not, that have a duration."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def step_tables(events: Sequence[Event], *, on_device: bool) -> list[StepTable]:
    """One table for each kind of step, in the order in which the kinds first appear.

    on_device: kernels of a GPU; otherwise operators of the CPU.
    """
    steps = sorted((e for e in events if _is_range(e, STEP)), key=lambda event: event["ts"])
    starts = [step["ts"] for step in steps]
    # A step lasts until the next one begins: what lies between two ranges is scheduling, which is part of it.
    ends = [*starts[1:], *(step["ts"] + step["dur"] for step in steps[-1:])]

    def kind(time: float) -> str | None:
        at = bisect_right(starts, time) - 1
        return (
            str(steps[at]["name"]).removeprefix(STEP) if at >= 0 and time < ends[at] else None
        )

    pieces = _kernels(events) if on_device else _operators(events)
    by_kind: dict[str | None, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        by_kind[kind(piece.launched)].append(piece)
    tables = []
    for name in dict.fromkeys(str(step["name"]).removeprefix(STEP) for step in steps):
        mine = [at for at, step in enumerate(steps) if step["name"] == STEP + name]
        wall = sum(ends[at] - starts[at] for at in mine) * 1e-6
        tables.append(_table(name, len(mine), wall, by_kind[name], on_device))
    return tables


@dataclass(frozen=True)
class _Piece:
    """One call. `own` is its time without the operators it called; microseconds."""

    name: str
    launched: float
    start: float
    duration: float
    own: float
    copy: bool = False
    outermost: bool = True


def _table(
    kind: str, steps: int, wall: float, pieces: Sequence[_Piece], on_device: bool
) -> StepTable:
    busy = _covered((p.start, p.start + p.duration) for p in pieces) * 1e-6
    calls: dict[str, list[float]] = defaultdict(list)
    for piece in pieces:
        calls[piece.name].append(piece.own)
    rows = [Row(name, len(times), sum(times) * 1e-6) for name, times in calls.items()]
    if not on_device and wall > busy:
        rows.append(Row(BETWEEN, 0, wall - busy))
    return StepTable(
        kind,
        steps,
        wall,
        busy,
        launches=sum(piece.outermost and not piece.copy for piece in pieces),
        copies=sum(piece.copy for piece in pieces),
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
    )


def _is_range(event: Event, prefix: str) -> bool:
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix)


def _kernels(events: Iterable[Event]) -> Iterator[_Piece]:
    launched: dict[Any, float] = {}  # by correlation
    kernels = []
    for event in events:
        category = event.get("cat")
        if category in ("cuda_runtime", "cuda_driver"):
            launched[event.get("args", {}).get("correlation")] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    for event in kernels:
        start, duration = float(event["ts"]), float(event["dur"])
        at = launched.get(event.get("args", {}).get("correlation"), start)
        copy = event["cat"] != "kernel"
        yield _Piece(short_name(event["name"]), at, start, duration, duration, copy)


def _operators(events: Iterable[Event]) -> Iterator[_Piece]:
    """Every operator with its own time. What an interpreted kernel calls is part of it, not listed."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" or _is_range(event, INTERPRETED):
            threads[event.get("tid")].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_: list[Event] = []
        children: dict[int, float] = defaultdict(float)
        depth: dict[int, int] = {}
        listed: list[Event] = []
        for event in thread:
            while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]:
                open_.pop()
            if any(_is_range(above, INTERPRETED) for above in open_):
                continue
            if open_:
                children[id(open_[-1])] += event["dur"]
            depth[id(event)] = len(open_)
            listed.append(event)
            open_.append(event)
        for event in listed:
            start, duration = event["ts"], event["dur"]
            own = max(0.0, duration - children[id(event)])
            yield _Piece(
                event["name"], start, start, duration, own, outermost=depth[id(event)] == 0
            )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        if high > end:
            total += high - max(low, end)
            end = high
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
