"""Measure the processor time that other programs take, since it makes a measured speed too low.

    before = usage()
    ...                                # load, generate
    share(before, usage())             # of the processors that this process may use

Neural networks on a CPU lose more than that share: every operator waits for its slowest thread, and threads
that wait spin meanwhile on the processor that the other program could have used (`common.environment`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from common.console import err

MOST = 1 / 3
"""Share of the processors, taken by other programs, above which a warning is printed."""
LEAST_SECONDS = 0.2
"""Shortest interval to warn of, or to measure: a handful of ticks is no information."""


@dataclass(frozen=True)
class Usage:
    """A reading of the machine's counters of processor time, in seconds since some fixed time.

    clock: wall time. machine: time that the usable processors were busy. ours: time of this process and
        its children.
    """

    clock: float
    machine: float = 0.0
    ours: float = 0.0


def processors() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usage() -> Usage:
    """Return a `Usage`, a reading of the counters of processor time. Systems without them seem idle."""
    now = time.perf_counter()
    try:
        times = psutil.cpu_times(percpu=True)
        machine = sum(_busy(times[number]) for number in processors())
        return Usage(now, machine, _ours())
    except (OSError, RuntimeError, IndexError, psutil.Error):
        return Usage(now)


def share(before: Usage, after: Usage) -> float:
    """Return the share 0 to 1 of the processors that other programs took between two readings.

    The counters tick every 10 ms, so that close readings give a coarse share.
    """
    elapsed = max(after.clock - before.clock, 1e-3)
    others = (after.machine - before.machine) - (after.ours - before.ours)
    return min(max(others / (elapsed * len(processors())), 0.0), 1.0)


def warn(before: Usage) -> None:
    """Print a warning on standard error if other programs have taken more than a third of the processors.

    before: a reading of the counters at the beginning; nothing is printed within 0.2 s of it.
    """
    after = usage()
    part = share(before, after)
    if part > MOST and after.clock - before.clock >= LEAST_SECONDS:
        err.print(
            f"Other programs take {part:.0%} of the processor, so this is slower than it could be."
            + _advice(),
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def _advice() -> str:
    """Return a sentence of advice on sharing processors, or an empty text if the user follows it already."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return ""
    return " OMP_WAIT_POLICY=PASSIVE loses less beside them, and is the default if they run at the start."


def _busy(times: object) -> float:
    # `steal` is what a hypervisor gave to other machines: as bad as another process.
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times, name, 0.0) for name in busy)


def _ours() -> float:
    """Return the processor seconds that this process and its children, ended or live, have used."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # ended meanwhile: it is among those that were
            total += sum(process.cpu_times()[:4])  # user and system, and both of its children
    return total
