"""Set environment variables that libraries read while PyTorch is imported; the user's values win.

PyTorch's threads come from GNU's OpenMP. A thread that waits for other threads spins before it sleeps, by
default for 300,000 turns (some 1 to 10 ms). On an idle machine that is the fastest way to begin the next
operator. Beside another program the spinning thread occupies a processor that the thread it waits for needs.
So a command looks at the machine first: where processors are shared, its threads sleep at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

from common.neighbours import Usage, processors, share, usage

QUIET = {"KINETO_LOG_LEVEL": "99"}
"""Turns off the profiler's own log, which says when it began and ended."""
SPIN = {"GOMP_SPINCOUNT": "10000"}
"""Turns that a thread spins where it is measured how fast something can be."""
SHORT_SPIN = {"GOMP_SPINCOUNT": "1000"}
"""The same where the machine is idle now, and may not be later."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Either one, given by the user, says how threads wait."""
THREADS = "OMP_NUM_THREADS"
CROWDED = 0.15
"""Share of the processors that others take, beyond which threads sleep at once."""
SAMPLE_SECONDS = 0.1
CGROUPS = Path("/sys/fs/cgroup")


def limit_threads_and_noise(
    environment: MutableMapping[str, str] = os.environ,
    *,
    measuring: bool = False,
    begun: Usage | None = None,
) -> None:
    """Set variables that limit PyTorch's threads and libraries' log messages, unless the user has set them.

    Call it before PyTorch is imported.

    environment: changed in place.
    measuring: True for a benchmark: threads spin while they wait, since the machine is theirs.
    begun: processor counters read earlier; what other programs have taken since then decides whether waiting
        threads sleep at once. None: the counters are read now.
    """
    made, limit = dict(QUIET), quota()
    if limit is not None and limit < len(processors()):
        made[THREADS] = str(max(1, int(limit)))
    if not any(name in environment for name in WAITING):
        if measuring:
            made |= SPIN
        else:
            crowded = is_crowded(environment, limit, begun or usage())
            made |= PASSIVE if crowded else SHORT_SPIN
    for name, value in made.items():
        environment.setdefault(name, value)


def is_crowded(
    environment: MutableMapping[str, str], limit: float | None, before: Usage
) -> bool:
    """Return True if PyTorch's threads have to share processors.

    They share with other programs, because of a quota, or where threads outnumber processors.

    environment: its `OMP_NUM_THREADS` may set the number of threads. limit: number of processors that `quota`
        allows; None: all.
    before: an earlier reading of the processor counters. Other programs' share since then is measured, over
        `SAMPLE_SECONDS` (0.1) or more.
    """
    threads = environment.get(THREADS, "")
    if limit is not None and limit < len(processors()):
        return True
    if threads.isdigit() and int(threads) > len(processors()):
        return True
    time.sleep(max(0.0, before.clock + SAMPLE_SECONDS - time.perf_counter()))
    return share(before, usage()) > CROWDED


def quota(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return how many processors a container may use, such as 1.5; None: no limit.

    root: the folder in which Linux keeps the limits of control groups. own: the file that names this
        process's groups. Versions 1 and 2 are read.
    """
    try:
        group = own.read_text().rpartition("0::")[2].strip().lstrip("/")
    except OSError:
        group = ""
    limits = []
    for folder in {root, root / group}:
        limits.append(_ratio(folder / "cpu.max"))
    limits.append(
        _ratio(root / "cpu" / "cpu.cfs_quota_us", root / "cpu" / "cpu.cfs_period_us")
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _ratio(*files: Path) -> float | None:
    try:
        allowed, period = " ".join(file.read_text() for file in files).split()
        found = int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None
    return found if found > 0 else None
