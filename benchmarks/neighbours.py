"""How fast a CPU generates beside other programs, by how its threads wait for each other.

    ladder bench neighbours            every way, four minutes
    ladder bench neighbours --quick    the ways that matter, one sample each, a minute

A way is an environment (`GOMP_SPINCOUNT`, `OMP_WAIT_POLICY`, which GNU's OpenMP reads when it is loaded) and
a number of threads, so each way is a process of its own. All are started first, and then asked in turn, so
that a slow minute of the machine hits them alike. A neighbour is a process that does nothing but loop. Decode
speed is what suffers: a step is a few hundred operators, and at the end of each all threads wait for the
slowest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evidence import ROOT, BenchOptions, Evidence, Metric, Run, collect
from benchmarks.server import import_path
from benchmarks.workloads import uniform
from common.errors import UserError
from common.neighbours import processors, share, usage

NAME = "neighbours"
MODEL = "smollm2"
PHASE = "04"
NEIGHBOURS, REQUESTS = (0, 1, 2), (1, 16)
PROMPT, MOST_TOKENS = 2, 512
SECONDS, QUICK_SECONDS = 1.0, 0.6
"""Of decoding in a sample."""
METRIC = "output_tokens_per_s"
WAIT = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
COUNT = "while True: pass"
TRIES = 3
"""How often a sample is taken, at most, while others than our neighbours are busy."""
PATIENCE = 150.0
"""Seconds after which no sample is taken again."""
MOST_OTHERS = 0.1


@dataclass(frozen=True)
class Way:
    """How threads wait. fewer: threads that PyTorch has less than there are processors."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    fewer: int = 0
    quick: bool = True

    @property
    def threads(self) -> int:
        """Threads of PyTorch."""
        return max(1, len(processors()) - self.fewer)


WAYS = (
    Way("300,000 turns (OpenMP's default)", {"GOMP_SPINCOUNT": "300000"}),
    Way("30,000 turns", {"GOMP_SPINCOUNT": "30000"}, quick=False),
    Way("10,000 turns", {"GOMP_SPINCOUNT": "10000"}),
    Way("1,000 turns", {"GOMP_SPINCOUNT": "1000"}),
    Way("no turn (passive)", {"OMP_WAIT_POLICY": "PASSIVE"}),
    Way("one thread fewer, 10,000 turns", {"GOMP_SPINCOUNT": "10000"}, fewer=1, quick=False),
)


class Decoder:
    """A process with a model that decodes in one way, on demand."""

    def __init__(self, way: Way, model: str, dtype: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in WAIT}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.neighbours", model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**kept, **way.environment}
            | {"OMP_NUM_THREADS": str(way.threads), "PYTHONPATH": import_path()},
        )

    def ask(self, requests: int, seconds: float) -> float:
        """Return tokens a second of so many requests; 0 requests: only wait until it is ready."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([requests, seconds]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process that decodes has ended; its errors are above")
        return float(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many processes that count and do nothing else."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", COUNT]) for _ in range(count)]
    try:
        time.sleep(0.2 * bool(count))  # until they do
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(options: BenchOptions) -> Evidence:
    """Measure every way beside 0, 1 and 2 neighbours, for one request and for sixteen."""
    if options.device.type != "cpu":
        raise UserError(
            f"device is {options.device}, but neighbours are about the CPU: --device cpu"
        )
    model, dtype = options.model or MODEL, str(options.dtype).removeprefix("torch.")
    ways = [way for way in WAYS if way.quick or not options.quick]
    deadline = time.monotonic() + (0.0 if options.quick else PATIENCE)
    samples: dict[tuple[str, int, int], list[float]] = {}
    worst: dict[tuple[str, int, int], float] = {}
    with ExitStack() as stack:
        decoders = {}
        for way in ways:
            decoders[way.name] = Decoder(way, model, dtype)
            stack.callback(decoders[way.name].close)
        for decoder in decoders.values():
            decoder.ask(0, 0.0)
        for repeat in range(options.repeats):
            for busy in NEIGHBOURS:
                with neighbours(busy):
                    for requests in REQUESTS:
                        for way in ways if repeat % 2 == 0 else reversed(ways):
                            key = way.name, busy, requests
                            seconds = QUICK_SECONDS if options.quick else SECONDS
                            rate, others = _sample(
                                decoders[way.name], requests, seconds, deadline
                            )
                            samples.setdefault(key, []).append(rate)
                            worst[key] = max(worst.get(key, 0.0), others)
    work = uniform(NAME, 1, PROMPT, MOST_TOKENS, 10_000)
    runs = [
        Run(
            variant=name,
            workload=work.name,
            workload_sha256=work.sha256,
            model=model.removeprefix("random:"),
            weights="random" if model.startswith("random:") else "real",
            dtype=dtype,
            metrics={METRIC: Metric(tuple(rates))},
            options={"neighbours": busy, "requests": requests, "threads": threads},
            noise={"other_cpu": round(worst[name, busy, requests], 4)},
        )
        for (name, busy, requests), rates in samples.items()
        for threads in [next(way.threads for way in ways if way.name == name)]
    ]
    return collect(NAME, runs, options.device)


def _sample(
    decoder: Decoder, requests: int, seconds: float, deadline: float
) -> tuple[float, float]:
    """Return a rate, and the part of the processors that neither we nor our neighbours had meanwhile."""
    best = (0.0, 2.0)
    for _ in range(TRIES):
        before = usage()
        rate = decoder.ask(requests, seconds)
        others = share(before, usage())
        if others < best[1]:
            best = rate, others
        if others <= MOST_OTHERS or time.monotonic() > deadline:
            break
    return best


def draw(evidence: Evidence, out: Path) -> None:
    """Draw a panel for one request and one for sixteen: each way's speed over the number of neighbours."""
    from benchmarks.plotting import colours, panels, save

    figure, axes = panels(len(REQUESTS))
    names = list(dict.fromkeys(run.variant for run in evidence.runs))
    shades = colours(names, "04_continuous")
    for ax, requests in zip(axes, REQUESTS, strict=True):
        for name in names:
            runs = evidence.find(name, requests=requests)
            at = [run.options["neighbours"] for run in runs]
            ax.plot(
                at, [run.median(METRIC) for run in runs], "o-", color=shades[name], label=name
            )
        ax.set_xticks(NEIGHBOURS)
        ax.set_xlabel("busy programs beside it")
        ax.set_ylim(bottom=0)
        ax.set_title("one request" if requests == 1 else f"{requests} requests")
    axes[0].set_ylabel("output tokens per second")
    axes[-1].legend(fontsize=7)
    save(figure, out, evidence)


def _decode(model: str, dtype: str) -> None:
    """Answer lines of [requests, seconds] with tokens a second, until the input ends."""
    import torch

    from common.sampling.params import SamplingParams
    from forward.loading import load_model
    from phases import phase_named
    from phases.registry import load_engine

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine: Any = load_engine(
        phase_named(PHASE),
        load_model(model, device="cpu", dtype=dtype),
        max_rows=max(REQUESTS),
        max_len=1024,
    )
    params = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
    for line in sys.stdin:
        count, seconds = json.loads(line)
        prompts = [[100 + number] * PROMPT for number in range(count)]
        requests = [request for prompt in prompts for request in engine.add(prompt, params)]
        if requests:
            engine.step()  # the prompts
        tokens, times = 0, [time.perf_counter()]
        while requests and times[-1] - times[0] < seconds and not engine.idle:
            tokens += len(engine.step())
            times.append(time.perf_counter())
        for request in requests:
            engine.abort(request)
        while not engine.idle:
            engine.step()
        rate = tokens / (times[-1] - times[0]) if tokens else 0.0
        print(rate, flush=True)


if __name__ == "__main__":
    _decode(*sys.argv[1:])
