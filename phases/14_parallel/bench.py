"""Phase 14: a model split over ranks against one that is whole.

On a CPU two processes share two cores, so splitting gains nothing there and shows what it costs: the evidence
is the time of a sum over ranks, and the rates of one rank and of two. On GPUs of one host: the workloads that
peers are measured by, for each number of ranks there is, and sums by size and way.

Every number of ranks is measured in processes of its own, part by part, and each part has a limit: what fails
or hangs ends with its processes, is told in the evidence, and the next part begins anew. If on GPUs an engine
in ranks fails, or sums by our own kernels do, engines add up by NCCL from then on. What is there so far is
in the cache folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

import parallel
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import (
    APPENDIX,
    BenchOptions,
    Evidence,
    Metric,
    Run,
    collect,
    sample_metrics,
)
from benchmarks.measure import alternate, summarize, timer
from benchmarks.plotting import MARKERS, colours, over_one, panels, save
from benchmarks.sums import WAYS, times
from benchmarks.workloads import Workload, uniform, workload
from common.paths import cache_home
from forward.shapes import SHAPES
from parallel.worker import end_with

PHASE, BEFORE = "14_parallel", "13_serving"
SUMS = "all-reduce"
FAILED = "failed"
STARTUP = "startup"
BYTES = (8 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 64 << 20)
WORK = {"single": "single-512", "offline": "offline-256", "prefill": "prefill-64x1024"}
SMALL = {"single": (1, 16, 32), "offline": (8, 16, 16), "prefill": (8, 96, 1)}
HIDDEN = 4096
GPU: dict[str, Any] = {"max_rows": 256, "max_len": 4160, "step_tokens": 16_384}
CPU: dict[str, Any] = {"max_rows": 8, "max_len": 160, "cache_bytes": 8 << 20}
USUAL_GPU, USUAL_CPU = "random:qwen3-8b", "random:tiny-window"
SECONDS = 300.0
"""Most seconds of a part. An engine takes the longest: its kernels are compiled and its graphs captured."""
SUMS_SECONDS = 90.0
"""And of sums by one way: they take seconds, and one that hangs must not take the time of what comes next."""
SAFE = {"own_sums": False}
"""Options of engines in ranks, once something of theirs has failed."""

Keep = Callable[[Sequence[Run]], None]


def run(options: BenchOptions) -> Evidence:
    """Sums over ranks, then every workload in one rank and in more. What is there so far is in the cache."""
    path = cache_home() / "bench" / f"{PHASE}-so-far.json"

    def keep(runs: Sequence[Run]) -> None:
        collect(PHASE, runs, options.device).write(path)

    runs = measure(options, ranks_here(options.device), keep)
    return evidence_of(PHASE, runs, options, "all")


def ranks_here(device: torch.device) -> list[int]:
    """Numbers of ranks: as many GPUs as there are, or two processes of a CPU."""
    most = torch.cuda.device_count() if device.type == "cuda" else 2
    return [count for count in (1, 2, 4, 8) if count <= most]


def measure(options: BenchOptions, counts: Sequence[int], keep: Keep) -> list[Run]:
    """Every part for every number of ranks; what has ended so far is given to `keep`."""
    runs: list[Run] = []
    for ranks in counts:
        more: dict[str, Any] = {}  # options of the engines
        again = ranks > 1 and options.device.type == "cuda"
        for group in groups(ranks, options.device):
            child: Child | None = None
            left = list(group)
            while left:
                part, begun = left.pop(0), time.monotonic()
                sums = part.startswith("reduce")
                try:
                    if child is None:
                        child = Child(options, ranks, more)
                        if part in WORK:  # the one before has failed
                            child.ask(STARTUP, SECONDS)
                    found = child.ask(part, SUMS_SECONDS if sums else SECONDS)
                except Failure as error:
                    said = {"ranks": ranks, "part": part, "error": str(error), **more}
                    found = [facts(options, FAILED, {"failures": Metric((1.0,))}, said)]
                    if child is not None:
                        child.end()
                    child = None
                    if again and part != "reduce nccl":
                        again, more = False, more | SAFE
                        left = left if sums else [part, *left]
                    elif part == STARTUP:
                        left = []  # without an engine there is nothing to measure
                runs += found
                keep(runs)
                _tell(ranks, part, time.monotonic() - begun, found)
            if child is not None:
                child.end()
    return runs


def groups(ranks: int, device: torch.device) -> Iterator[list[str]]:
    """Parts that share a process: sums by each way, everything with the large engine, and the comparison.

    Sums are the first: they take seconds, and tell whether an engine can trust them.
    """
    ways = WAYS if device.type == "cuda" else ("nccl",)
    if ranks > 1:
        yield [f"reduce {way}" for way in ways]
    yield [STARTUP, *WORK]
    if ranks > 1:
        yield ["same"]


def facts(
    options: BenchOptions,
    name: str,
    metrics: Mapping[str, Metric],
    said: Mapping[str, Any],
    model: str = "",
) -> Run:
    """Evidence that is not of a workload, but of what is `said` of it."""
    model = (model or model_of(options)).removeprefix("random:")
    dtype = str(options.dtype).removeprefix("torch.")
    sha = hashlib.sha256(
        json.dumps([name, model, dict(said)], default=str).encode()
    ).hexdigest()
    return Run(PHASE, name, sha, model, "random", dtype, metrics, said)


def model_of(options: BenchOptions) -> str:
    """Return the model to measure: the one asked for, or the device's usual one."""
    return options.model or (USUAL_GPU if options.device.type == "cuda" else USUAL_CPU)


def _tell(ranks: int, part: str, seconds: float, found: Sequence[Run]) -> None:
    """One line on standard error for each thing that was found."""
    for run in found:
        shown = ", ".join(
            f"{name} {run.median(name):,.1f}"
            for name in (
                "all_reduce_us",
                "output_tokens_per_s",
                "prompt_tokens_per_s",
                "seconds",
                "same_fraction",
            )
            if name in run.metrics
        )
        said = (
            run.options.get("error")
            or f"{run.workload} {run.options.get('bytes', '')} {shown}"
        )
        print(f"{ranks} ranks, {part} ({seconds:.0f} s): {said}", file=sys.stderr, flush=True)


# A process for each number of ranks.


ENDING = 30.0
"""Seconds in which a process that was killed ends."""


class Failure(Exception):
    """A part raised, took too long, or ended its process."""


class Child:
    """A process that measures parts, and can be ended with all that it has started."""

    def __init__(self, options: BenchOptions, ranks: int, more: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment, process_group=0
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send((options, ranks, dict(more)))

    def ask(self, part: str, seconds: float) -> list[Run]:
        """What a part finds. Raises `Failure`."""
        try:
            self.connection.send(part)
            if not self.connection.poll(seconds):
                raise Failure(f"no answer within {seconds:.0f} s")
            found, error = self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING)
            raise Failure(f"its process has ended (exit code {self.process.poll()})") from None
        if error:
            raise Failure(error)
        runs: list[Run] = found
        return runs

    def end(self) -> None:
        """End it, and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a device may keep a process that is dead
            self.process.wait(ENDING)
        self.connection.close()


def child_main(descriptor: int) -> None:
    """The child's life: parts come in, runs or an error go out. It ends with its parent."""
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    connection = Connection(descriptor)
    bench = Bench(*connection.recv())
    while True:
        part = connection.recv()
        try:
            answer = bench.measured(part), ""
        except Exception as error:
            traceback.print_exc()
            answer = [], f"{type(error).__name__}: {str(error)[:400]}"
        connection.send(answer)


class Bench:
    """One number of ranks. more: options of its engines."""

    def __init__(self, options: BenchOptions, ranks: int, more: Mapping[str, Any]) -> None:
        self.options = options
        self.ranks = ranks
        self.more = more
        self.cuda = self.options.device.type == "cuda"
        self.model = model_of(options)
        self._engine: Any = None

    def measured(self, part: str) -> list[Run]:
        """A part's evidence."""
        if part.startswith("reduce"):
            return self.sums(part.removeprefix("reduce "))
        if part == "same":
            return [self.same()]
        if part == STARTUP:
            return [self.startup()]
        return [self.work(part)]

    def sums(self, way: str) -> list[Run]:
        """Microseconds of a sum over ranks, by bytes."""
        sizes = list(BYTES if self.cuda else BYTES[:2] if self.options.quick else BYTES[:4])
        found = parallel.together(
            self.ranks, times, way, sizes, HIDDEN, device=self.options.device.type
        )[0]
        kind = way if self.cuda else "gloo"
        return [
            facts(
                self.options,
                SUMS,
                sample_metrics([{"all_reduce_us": value} for value in microseconds]),
                {"ranks": self.ranks, "way": kind, "bytes": size, "hidden": HIDDEN},
            )
            for size, microseconds in found.items()
        ]

    def same(self) -> Run:
        """Greedy tokens of a small shape in one rank and in more. In half precision ties may differ, late."""
        small = "random:qwen3-0.6b" if self.cuda else USUAL_CPU
        work = uniform("uniform-4x32x24", 4, 32, 24, vocab=250)
        found = []
        for ranks in (1, self.ranks):
            engine = self.engine_of(small, ranks)
            found.append(
                [
                    completion.token_ids
                    for completion in engine.generate(work.prompts, work.params)
                ]
            )
            if ranks > 1:
                engine.loop.close()
            del engine  # it fills its GPU, and the next one is on the same
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
        equal = [
            one == more
            for pair in zip(*found, strict=True)
            for one, more in zip(*pair, strict=True)
        ]
        share = Metric((sum(equal) / len(equal),))
        said = {"ranks": self.ranks, "part": "same", **self.more}
        return facts(self.options, work.name, {"same_fraction": share}, said, small)

    def startup(self) -> Run:
        """Make the engine."""
        begun = time.perf_counter()
        self._engine = self.engine_of(self.model, self.ranks)
        print(self._engine.memory_plan, file=sys.stderr, flush=True)
        metrics = {"seconds": Metric((time.perf_counter() - begun,))}
        said = {"ranks": self.ranks, "tokens": self._engine.memory_plan.tokens, **self.more}
        return facts(self.options, STARTUP, metrics, said)

    def work(self, part: str) -> Run:
        """Samples of one workload."""
        large = self.cuda and not self.options.quick
        work = workload(WORK[part]) if large else small_work(part)
        sample = timer(self._engine, work, self.options.device)
        tries = (
            1 if self.options.quick else 2 if self.cuda else None
        )  # a part must end within its seconds
        kept = alternate(
            {part: sample},
            self.options.repeats,
            tries=tries,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return summarize(
            BEFORE if self.ranks == 1 else PHASE,
            work,
            kept[part],
            model=self.model,
            dtype=self.options.dtype,
            options={"ranks": self.ranks, "part": part, **self.more},
        )

    def engine_of(self, model: str, ranks: int, **more: Any) -> Any:
        """An engine in so many ranks."""
        kind = str(self.options.dtype).removeprefix("torch.")
        given: dict[str, Any] = {
            "device": self.options.device.type,
            "dtype": kind,
            "prefix_cache": False,
            "drafter": "none",  # what random weights say repeats itself, by chance, for some ranks
        }
        given |= (GPU if self.cuda else CPU) | more
        if ranks == 1:
            return engine_of(BEFORE + APPENDIX, model, **given)
        return engine_of(PHASE + APPENDIX, model, tensor_parallel=ranks, **given, **self.more)


def small_work(part: str) -> Workload:
    """The workload of a part for two cores."""
    requests, prompt, output = SMALL[part]
    return uniform(
        f"uniform-{requests}x{prompt}x{output}", requests, prompt, output, vocab=250
    )


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Scaling, a token's time, what splitting and copying are good for, and sums by size."""
    figure, (scaling, token, choice, sums) = panels(4, rows=2, height=3.3)
    rates = {
        (run.options["part"], run.options["ranks"]): run
        for run in evidence.runs
        if is_rate(run)
    }
    draw_scaling(scaling, rates)
    draw_token(token, rates, evidence)
    draw_choice(choice, rates)
    draw_sums(sums, evidence.find(workload=SUMS))
    save(figure, out, evidence)


def is_rate(run: Run) -> bool:
    """Whether a run is one of a workload, with nothing out of the ordinary."""
    return run.options.get("part") in WORK and "output_tokens_per_s" in run.metrics


Rates = Mapping[tuple[str, int], Run]


def rate(run: Run) -> float:
    """What a part is about: prompt tokens or output tokens a second."""
    return run.median(
        "prompt_tokens_per_s" if run.options["part"] == "prefill" else "output_tokens_per_s"
    )


def draw_scaling(axes: Axes, rates: Rates) -> None:
    """Each part's rate over that of one rank, and the most that could be."""
    counts, shown = sorted({ranks for _, ranks in rates}), colours(WORK, PHASE)
    for place, part in enumerate(WORK):
        points = [
            (n, rate(rates[part, n]) / rate(rates[part, 1]))
            for n in counts
            if {(part, n), (part, 1)} <= set(rates)
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker=MARKERS[place],
                color=shown[part],
                label=part,
            )
    over_one(axes, counts, "rank")
    axes.set_xlabel("ranks")
    axes.set_title("Scaling")


def draw_token(axes: Axes, rates: Rates, evidence: Evidence) -> None:
    """One request's token: its share of one rank's time, the sums over ranks, and the rest."""
    found = sorted((ranks, run) for (part, ranks), run in rates.items() if part == "single")
    whole = next((1e3 / rate(run) for ranks, run in found if ranks == 1), None)
    bottom = {ranks: 0.0 for ranks, _ in found}
    parts: dict[str, dict[int, float]] = {
        "one rank's work, divided": {},
        "sums": {},
        "the rest": {},
    }
    for ranks, run in found:
        step = 1e3 / rate(run)
        work = step if whole is None else min(step, whole / ranks)
        sums = min(step - work, sums_of_a_token(evidence, run))
        for name, value in zip(parts, (work, sums, step - work - sums), strict=True):
            parts[name][ranks] = value
    shown = colours(parts, PHASE)
    for name, values in parts.items():
        xs = range(len(found))
        axes.bar(
            xs,
            list(values.values()),
            0.6,
            list(bottom.values()),
            color=shown[name],
            label=name,
        )
        bottom = {ranks: bottom[ranks] + value for ranks, value in values.items()}
    axes.set_xticks(range(len(found)), [str(ranks) for ranks, _ in found])
    axes.set_xlabel("ranks")
    axes.set_ylabel("milliseconds a token")
    axes.set_title("One request: where the time goes")
    axes.legend()


def sums_of_a_token(evidence: Evidence, run: Run) -> float:
    """Milliseconds: two sums a layer and the embedding's, at the quickest that was measured by itself."""
    ranks, shape = run.options["ranks"], SHAPES.get(run.model)
    small = [
        r for r in evidence.find(workload=SUMS, ranks=ranks) if r.options["bytes"] == BYTES[0]
    ]
    if not small or shape is None or ranks == 1:
        return 0.0
    return (2 * shape.num_layers + 1) * min(r.median("all_reduce_us") for r in small) / 1e3


def draw_choice(axes: Axes, rates: Rates) -> None:
    """The same GPUs as one engine that is split, and as copies: one user's rate, and all users' together."""
    counts = sorted(n for part, n in rates if part == "offline" and ("single", n) in rates)
    most = max(counts, default=0)
    points = []
    for ranks in counts:
        copies = most // ranks
        name = f"{copies} × {ranks} rank{'s' * (ranks > 1)}"
        points.append(
            (rate(rates["single", ranks]), copies * rate(rates["offline", ranks]), name)
        )
    if points:
        axes.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            color="#8A8A8A",
            linewidth=1.0,
        )
    shown = colours((name for _, _, name in points), PHASE)
    for place, (x, y, name) in enumerate(points):
        axes.plot([x], [y], marker=MARKERS[place], color=shown[name], linestyle="")
        axes.annotate(name, (x, y), (6, 4), textcoords="offset points", fontsize=8)
    axes.margins(x=0.3, y=0.25)
    axes.set_xlabel("one user's tokens per second")
    axes.set_ylabel("all users' together")
    axes.set_title(f"{most} ranks: split, or copied (computed)")


def draw_sums(axes: Axes, found: Sequence[Run]) -> None:
    """Microseconds of a sum by bytes, number of ranks and way."""
    kinds = sorted({(run.options["ranks"], run.options["way"]) for run in found})
    shown = colours((f"{way}, {ranks} ranks" for ranks, way in kinds), PHASE)
    for place, (ranks, way) in enumerate(kinds):
        some = [
            run for run in found if (run.options["ranks"], run.options["way"]) == (ranks, way)
        ]
        some.sort(key=lambda run: int(run.options["bytes"]))
        axes.plot(
            [run.options["bytes"] for run in some],
            [run.median("all_reduce_us") for run in some],
            marker=MARKERS[place % len(MARKERS)],
            color=shown[f"{way}, {ranks} ranks"],
            label=f"{way}, {ranks} ranks",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds")
    axes.set_title("A sum over ranks")
    if kinds:
        axes.legend()


if __name__ == "__main__":
    child_main(int(sys.argv[1]))
