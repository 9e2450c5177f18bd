"""Measuring: samples in alternating order, each watched for disturbance by other processes.

A speed measured once, or while something else ran, says nothing. `alternate` warms every variant up, takes
the samples of all variants in turn (so that a slow minute of the machine hits them alike), and takes a sample
again when other processes used a noticeable share of the processor while it ran. Where no headline is at
stake, a variant whose samples took `ENOUGH_SECONDS` together has enough: a long one is a mean over its own
time.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.evidence import PERCENTILES
from benchmarks.workloads import Workload
from common.collector import freeze_collector
from common.device import synchronize
from common.events import Completion, Streams, generate
from common.neighbours import LEAST_SECONDS, share, usage
from common.sampling.params import SamplingParams

Sample = dict[str, float]
"""One measurement: metric name -> value. `seconds` is the time that a roofline is compared with."""

MAX_OTHER_CPU = 0.10
"""A sample is dirty when other processes used more than this share of the cores we may use."""
MAX_SWITCHES_PER_S = 200.0
"""Or when the kernel took the processor away from us this often per second and thread."""

LEAST_OF_A_CORE = 0.05
"""Share of a processor from which on evidence names another program."""

TRIES = 4
"""How often a sample is taken, at most, until it is clean; `ladder bench --quick` sets it to 1."""
ENOUGH_SECONDS = 20.0
"""Where a bench says so, no further sample of a variant whose samples took longer than this together."""
MAX_SAMPLE_SECONDS = 300.0
"""No further try of a sample whose tries took longer than this together."""


@dataclass(frozen=True)
class Noise:
    """How far other processes disturbed a stretch of time.

    other_cpu: processor time of everything but this process and its children, as a share of all cores.
    switches_per_s: involuntary context switches of this process, per second and torch thread.
    """

    other_cpu: float = 0.0
    switches_per_s: float = 0.0

    @property
    def dirty(self) -> bool:
        """Whether a sample taken then should be taken again."""
        return self.other_cpu > MAX_OTHER_CPU or self.switches_per_s > MAX_SWITCHES_PER_S

    @property
    def score(self) -> float:
        """How bad, with 1 at the limit."""
        return max(self.other_cpu / MAX_OTHER_CPU, self.switches_per_s / MAX_SWITCHES_PER_S)


@dataclass
class Samples:
    """The samples of one variant that were kept, and what happened around them."""

    kept: list[Sample] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    discarded: int = 0

    def noise(self) -> dict[str, float]:
        """The worst disturbance among the kept samples, for the evidence file."""
        return {
            "other_cpu": round(max((n.other_cpu for n in self.noises), default=0.0), 4),
            "switches_per_s": round(
                max((n.switches_per_s for n in self.noises), default=0.0), 1
            ),
            "discarded": self.discarded,
        }


class Watch:
    """Notices other processes: `with Watch() as watch: ...`, then `watch.noise`.

    On a system without per-processor times for the whole machine, or where they cannot be read, it sees none.
    """

    noise = Noise()

    def __enter__(self) -> Watch:
        self._start, self._switches = usage(), _switches()
        return self

    def __exit__(self, *_: object) -> None:
        after, elapsed = usage(), time.perf_counter() - self._start.clock
        if elapsed < LEAST_SECONDS:
            self.noise = Noise()
            return
        switches = (_switches() - self._switches) / elapsed / max(torch.get_num_threads(), 1)
        self.noise = Noise(share(self._start, after), switches)


class Beside:
    """What else runs on the host from the moment this is made: `seen` is the field `beside` of evidence."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._load = _load()
        self._before = _busy_seconds()

    def seen(self) -> dict[str, Any]:
        """Return the load average at both ends, and the other programs that took most of a processor.

        A program counts from `LEAST_OF_A_CORE` of one processor on, the mean over the whole time. Of one that
        ended meanwhile only the load average tells.
        """
        elapsed = max(time.monotonic() - self._began, 1e-3)
        shares: dict[str, float] = defaultdict(float)
        for process, seconds in _busy_seconds().items():
            with suppress(psutil.Error):  # it has just ended
                shares[process.name()] += (seconds - self._before.get(process, 0.0)) / elapsed
        busiest = sorted(shares, key=shares.__getitem__, reverse=True)[:5]
        busy = {n: round(shares[n], 2) for n in busiest if shares[n] >= LEAST_OF_A_CORE}
        return {"load": [self._load, _load()], "busy": busy}


def release_memory(device: torch.device) -> None:
    """Free the memory of engines and models that nothing refers to any more, on a GPU that of PyTorch's cache
    as well.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)


def alternate(
    variants: Mapping[str, Callable[[int], Sample]],
    repeats: int = 3,
    *,
    warm: Mapping[str, Callable[[], object]] | None = None,
    tries: int | None = None,
    settle: float = 1.0,
    enough: float = inf,
    beside: bool = False,
    log: Callable[[str], None] = say,
) -> dict[str, Samples]:
    """Take `repeats` samples of each variant in alternating order (a b, b a, a b, ...).

    variants: name -> function of the call's number that returns one sample. Whatever it builds and throws
        away is its own affair: only what it reports counts. No two calls have the same number, warm-ups and
        samples taken again included, so `work.cold(number)` finds nothing in an engine's prefix cache.
    warm: name -> function called before each sample. Without it, each variant runs once untimed at the start.
    tries: a dirty sample is taken up to this often in all (`TRIES` by default), after a pause that grows from
        `settle` seconds, but not again once its tries took `MAX_SAMPLE_SECONDS`; the least disturbed is kept,
        and the evidence says how dirty it was.
    enough: seconds of a variant's samples after which no further one is taken.
    beside: the caller has started busy programs. That they take the processor away is what is measured, and
        makes no sample dirty.
    log: called with one line a sample; by default it goes to standard error, since a sample may take minutes.
    """
    tries, number = TRIES if tries is None else tries, count()
    if warm is None:
        for run in variants.values():
            run(next(number))
    kept = {name: Samples() for name in variants}
    with kept_out():  # as in a server: a collection takes 200 ms of one sample
        for repeat in range(repeats):
            order = list(variants)
            for name in order if repeat % 2 == 0 else reversed(order):
                if sum(s.get("seconds", 0.0) for s in kept[name].kept) > enough:
                    continue
                best: tuple[Noise, Noise, Sample] | None = None
                begun = time.perf_counter()
                for attempt in range(tries):
                    if warm is not None and name in warm:
                        warm[name]()
                    with Watch() as watch:
                        sample = variants[name](next(number))
                    dirt = replace(watch.noise, switches_per_s=0.0) if beside else watch.noise
                    if best is None or dirt.score < best[0].score:
                        best = dirt, watch.noise, sample
                    log(_line(name, repeat, sample, dirt))
                    if not dirt.dirty or time.perf_counter() - begun > MAX_SAMPLE_SECONDS:
                        break
                    if attempt + 1 < tries:
                        time.sleep(settle * 2**attempt)
                assert best is not None
                kept[name].discarded += attempt
                kept[name].noises.append(best[1])
                kept[name].kept.append(best[2])
    return kept


def time_generation(
    engine: Streams,
    workload: Workload,
    device: torch.device | str = "cpu",
    params: Sequence[SamplingParams] | None = None,
) -> Sample:
    """Run the whole workload through a phase, all requests at once, and measure it.

    params: what is asked for, if it is not what the workload says.

    Arrival times are ignored here: a phase that admits requests while it runs replays them itself, and turns
    its completions into metrics with `request_metrics`.
    """
    prompts, params = workload.prompts, list(params or workload.params)
    with memory(device) as used:
        start = time.perf_counter()
        completions = generate(engine, prompts, params)
        synchronize(device)
        seconds = time.perf_counter() - start
    sample = request_metrics(completions, seconds)
    if used.peak is not None:
        sample["peak_memory_bytes"] = float(used.peak)
    return sample


def timer(
    engine: Streams, workload: Workload, device: torch.device | str
) -> Callable[[int], Sample]:
    """A variant for `alternate`: times `workload` cold, other tokens each call."""
    return lambda number: time_generation(engine, workload.cold(number), device)


def growth(engine: Streams, work: Workload, points: Sequence[int]) -> dict[int, Samples]:
    """The mean rate up to each of `points` tokens, all from one generation of a single request.

    How long the first 200 tokens took does not depend on what came later.
    """
    generate(engine, work.prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    with Watch() as watch:
        (done,) = generate(engine, work.prompts, work.params)
    found = {}
    for tokens in points:
        seconds = done.times[tokens - 1] - done.arrival
        sample = {"seconds": seconds, "output_tokens_per_s": tokens / seconds}
        found[tokens] = Samples([sample], [watch.noise])
    return found


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many processes beside the block that count and do nothing else."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(0.2 * bool(count))  # until they do
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def request_metrics(completions: Sequence[Completion], seconds: float) -> Sample:
    """Throughput over `seconds`, and percentiles of the latencies of finished requests, in milliseconds."""
    outputs = sum(len(completion.token_ids) for completion in completions)
    prompts = sum(
        len(completion.prompt_ids) for completion in completions if completion.sample == 0
    )
    sample = {
        "seconds": seconds,
        "output_tokens_per_s": outputs / seconds,
        "prompt_tokens_per_s": prompts / seconds,
    }
    sample |= percentiles("ttft_ms", [c.ttft_ms for c in completions if c.ttft_ms is not None])
    sample |= percentiles("itl_ms", [gap for c in completions for gap in c.itl_ms])
    sample |= percentiles("e2e_ms", [c.e2e_ms for c in completions if c.e2e_ms is not None])
    return sample


def percentiles(name: str, values: Sequence[float]) -> Sample:
    """`name_p50`, `_p95`, `_p99` (linear between neighbours) and `name_mean`; nothing without values."""
    if not values:
        return {}
    found = {f"{name}_{p}": float(np.percentile(values, int(p[1:]))) for p in PERCENTILES}
    return {**found, f"{name}_mean": float(np.mean(values))}


@contextmanager
def kept_out() -> Iterator[None]:
    """Keep the collector out as a server does, for a while."""
    before = gc.get_threshold()
    freeze_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@dataclass
class Memory:
    """Filled in when the `memory` block ends: the peak, in bytes, or None where it cannot be known."""

    peak: int | None = None


@contextmanager
def memory(device: torch.device | str = "cpu") -> Iterator[Memory]:
    """Peak memory inside the block: what tensors occupy on CUDA, the process's resident set on a CPU.

    The kernel can reset its high-water mark of the resident set (Linux, `/proc/self/clear_refs`); where it
    cannot, a CPU has no peak here, because the mark of the whole process's life says nothing about the block.
    """
    device, used = torch.device(device), Memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    resettable = device.type == "cpu" and _reset_resident_peak()
    yield used
    if device.type == "cuda":
        used.peak = torch.cuda.max_memory_allocated(device)
    elif resettable:
        used.peak = _resident_peak()


def _reset_resident_peak() -> bool:
    gc.collect()
    with suppress(
        OSError, AttributeError
    ):  # what the C library keeps for later use would hide new use of it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _load() -> float:
    """Return the load average of the last minute."""
    return round(psutil.getloadavg()[0], 2)


def _busy_seconds() -> dict[psutil.Process, float]:
    """Return the processor seconds of every process but this one and its children."""
    own = psutil.Process()
    ours = {own, *own.children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended meanwhile, or is not ours to look at
            if process not in ours:
                found[process] = sum(process.cpu_times()[:2])
    return found


def _switches() -> float:
    """Count our involuntary context switches up to now."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


def _line(name: str, repeat: int, sample: Sample, noise: Noise) -> str:
    rate = sample.get("output_tokens_per_s")
    value = (
        f"{rate:,.1f} tokens/s" if rate else "{}: {:,.3f}".format(*next(iter(sample.items())))
    )
    state = f"  (dirty: {noise.other_cpu:.0%} other processes)" if noise.dirty else ""
    return f"{name} #{repeat + 1}: {value}{state}"
