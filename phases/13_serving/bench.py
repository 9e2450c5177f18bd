"""Phase 13: what HTTP costs on top of the engine, and what a server gains from batching.

On a CPU: the same server in front of this ladder's engine and in front of phase 02, one request at a time. On
a GPU: the engine's own rate, the same requests over HTTP, the first token of one user, and arrivals by the
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_graphs
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, Samples, alternate, summarize, time_generation
from benchmarks.plotting import COLOURS, number, panels, save
from benchmarks.roofline import ceilings
from benchmarks.server import Server
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Item, Workload, uniform, workload

PHASE, ENGINE, ALONE = "13_serving", "09_cuda_graphs, no server", "13_serving, phase 02 one at a time"
USERS = (1, 8, 64, 128)
PROMPTS = (32, 128, 512)
OUTPUT = 16
RATES = (4.0, 8.0, 16.0)
SERVING = ("baseline", "continuous_batching", "paged_attention", "chunked_prefill", "prefix_caching")
STEP_TOKENS, ROWS, MAX_LEN, CACHE_TOKENS = 16_384, 256, 4096, 300_000
"""Of the engine on a GPU; phase 09 is measured with the same."""


def run(options: BenchOptions) -> Evidence:
    """Users and prompt lengths on a CPU; throughput, latency and arrivals on a GPU."""
    (target,) = targets(options)
    runs = on_cuda(target) if options.device.type == "cuda" else on_cpu(target)
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


# CPU.


def on_cpu(options: BenchOptions) -> list[Run]:
    """Closed loops of 1 to 128 users; 64 of them with phase 02; three prompt lengths at 8 users."""
    model, runs = options.model or "smollm2", []
    users = USERS[:2] if options.quick else USERS
    with Server(model, device="cpu", max_rows=128, max_len=1024, cache_bytes=1 << 30) as server:
        server.sample(closed(2, 32), users=2)  # the first steps pay for allocations
        for count in users:
            work = closed(max(8, count), 64)
            runs.append(one(PHASE, work, options, server.sample(work, users=count), {"users": count}))
        for length in PROMPTS[:1] if options.quick else PROMPTS:
            work = closed(8, length)
            facts = {"users": 8, "prompt": length}
            runs.append(one(f"{PHASE}, prompts", work, options, server.sample(work, users=8), facts))
    with Server(model, device="cpu", phase="02") as server:
        server.sample(closed(1, 32), users=1)
        count = users[-1] if options.quick else 64
        work = closed(max(8, count), 64)
        runs.append(one(ALONE, work, options, server.sample(work, users=count), {"users": count}))
    return runs


def closed(requests: int, prompt: int) -> Workload:
    """Requests of one length, other tokens in each workload: a prefix cache finds nothing."""
    return uniform(f"closed-{requests}x{prompt}+{OUTPUT}", requests, prompt, OUTPUT, seed=requests * prompt)


def one(variant: str, work: Workload, options: BenchOptions, sample: Sample, facts: Mapping[str, Any]) -> Run:
    """Evidence of one sample."""
    return summarize(
        variant, work, Samples([sample]), model=options.model or "", dtype=options.dtype, options=facts
    )


# GPU.


def on_cuda(options: BenchOptions) -> list[Run]:
    """`offline-256` with and without HTTP, one user with and without, and arrivals by the clock."""
    bench = OnCuda(options)
    with Server(options.model or "", **bench.engine_options(), dtype=bench.dtype) as server:
        runs = bench.throughput(server) + bench.first_token(server) + bench.arrivals(server)
    return runs


class OnCuda:
    """The engine in this process, and the same engine behind a server."""

    def __init__(self, options: BenchOptions) -> None:
        self.options, self.model = options, load_target(options)
        self.dtype = str(options.dtype).removeprefix("torch.")
        self.engine = cuda_graphs.load(self.model, **self.engine_options())
        self.shift = 0

    def engine_options(self) -> dict[str, Any]:
        """The same for both."""
        size = CACHE_TOKENS * self.model.config.kv_bytes_per_token(self.model.dtype)
        return {"max_rows": ROWS, "max_len": MAX_LEN, "step_tokens": STEP_TOKENS, "cache_bytes": size}

    def cold(self, work: Workload) -> Workload:
        """Other tokens in every sample: the prefix caches live on."""
        self.shift += 1
        return work.cold(self.shift)

    def throughput(self, server: Server) -> list[Run]:
        """256 requests at once, from four client processes."""
        work = workload("offline-256")
        if self.options.quick:
            work = work.first(16)
        return self.compare(
            work,
            {
                ENGINE: lambda _: time_generation(self.engine, self.cold(work), self.options.device),
                PHASE: lambda _: server.sample(self.cold(work), users=len(work.items), processes=4),
            },
            {"users": len(work.items)},
        )

    def first_token(self, server: Server) -> list[Run]:
        """One user, who waits for each answer: what the way through two processes adds."""
        work = uniform("one-user-16x128+32", 16, 128, 32)

        def alone(_: int) -> Sample:
            found: list[Sample] = []
            for item in self.cold(work).prompts:
                single = replace(work, items=(Item(tuple(item), 32),), shift=0)
                found.append(time_generation(self.engine, single, self.options.device))
            return {name: sorted(one[name] for one in found)[len(found) // 2] for name in found[0]}

        return self.compare(
            work, {ENGINE: alone, PHASE: lambda _: server.sample(self.cold(work), users=1)}, {"users": 1}
        )

    def arrivals(self, server: Server) -> list[Run]:
        """Five workloads at three rates."""
        runs = []
        for name in SERVING[:1] if self.options.quick else SERVING:
            for rate in RATES[:1] if self.options.quick else RATES:
                work = workload(name)
                sample = server.sample(self.cold(work), rate=rate)
                runs.append(one(PHASE, work, self.options, sample, {"rate": rate}))
        return runs

    def compare(
        self, work: Workload, variants: Mapping[str, Callable[[int], Sample]], facts: Mapping[str, Any]
    ) -> list[Run]:
        """Alternating samples, after one of each that does not count."""
        kept = alternate(variants, self.options.repeats)
        return [
            summarize(
                name, work, samples, model=self.options.model or "", dtype=self.options.dtype, options=facts
            )
            for name, samples in kept.items()
        ]


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Left: tokens a second by users, or with and without HTTP. Right: what a user waits for."""
    figure, (left, right) = panels(2, height=3.2)
    runs = [run for run in evidence.runs if "users" in run.options and "prompt" not in run.options]
    labels = [f"{run.variant.removeprefix('13_serving, ')}\n{run.options['users']} users" for run in runs]
    for place, run in enumerate(runs):
        colour = COLOURS[0] if run.variant == PHASE else COLOURS[1]
        value = run.median("output_tokens_per_s")
        left.barh(place, value, color=colour)
        left.annotate(
            number(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
        right.barh(place - 0.2, run.median("ttft_ms_p50"), 0.36, color=colour)
        right.barh(place + 0.2, run.median("itl_ms_p50"), 0.36, color=colour, alpha=0.5)
    left.set_yticks(range(len(runs)), labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("output tokens a second")
    left.set_title("Everybody together")
    left.margins(x=0.25)
    right.set_yticks([])
    right.invert_yaxis()
    right.set_xscale("log")
    right.set_xlabel("ms, median: first token (full) and gap (pale)")
    right.set_title("Each of them")
    save(figure, out, evidence)
