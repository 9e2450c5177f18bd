"""Phase 13: what HTTP costs on top of the engine, and what a server gains from batching.

On a CPU: the same server in front of this phase's engine and in front of phase 02, one request at a time. On
a GPU: the engine's own rate, the same requests over HTTP, the first token of one user, and arrivals by the
clock. Each by this phase alone, and with the appendix by `ladder serve`. No engine drafts: what HTTP costs
and what batching brings is the question.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Samples, release_memory, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.published import SIZES
from benchmarks.replay import time_replay
from benchmarks.server import Server, Started
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, uniform, workload

PHASE = "13_serving"
ENGINE = "09_cuda_graphs, no server"
ALONE = "13_serving, phase 02 one at a time"
LENGTHS, ARRIVALS = f"{PHASE}+prompts", f"{PHASE}+arrivals"
USERS = (1, 8, 64, 128)
QUESTION, ANSWER = 16, 48
"""Tokens in and out of one request on a CPU."""
PROMPTS, SHORT = (32, 128, 512), 16
RATES = (4.0, 8.0, 16.0)
ARRIVING_SECONDS = 8
"""How long people come by the clock, at least: workloads are repeated, with other tokens."""
SERVING = (
    "baseline",
    "continuous_batching",
    "paged_attention",
    "chunked_prefill",
    "prefix_caching",
)
CACHE_TOKENS = 300_000
"""Of the engine on a GPU; phase 09 is measured with the same."""


def run(options: BenchOptions) -> Evidence:
    """Users and prompt lengths on a CPU; throughput, latency and arrivals on a GPU."""
    (target,) = targets(options)
    runs = on_cuda(target) if options.device.type == "cuda" else on_cpu(target)
    return evidence_of(PHASE, runs, options)


# CPU.


def on_cpu(options: BenchOptions) -> list[Run]:
    """Run 1 to 128 users, 64 of them also with phase 02 as the server; then 8 users, three prompt lengths.

    Each user waits for an answer before the next request.
    """
    bench = Bench(replace(options, dtype=cpu_dtype(options.dtype)))
    flags: dict[str, Any] = {"device": "cpu", "dtype": bench.dtype_name}
    sizes: dict[str, Any] = {
        **flags,
        "max_len": 1024,
        "max_rows": USERS[-1],
        "cache_bytes": 1 << 30,
        "speculate": False,
    }
    quick = options.quick
    many, least = (8, 2) if quick else (64, None)
    runs: list[Run] = []

    def ask(variant: str, server: Started, work: Workload, **facts: Any) -> None:
        server.sample(work.cold(99).first(2), users=1, processes=1)  # the first steps allocate
        users = facts["users"]
        samples = [
            server.sample(work.cold(n), users=users, processes=2)
            for n in range(options.repeats)
        ]
        runs.append(bench.run_of(variant, work, Samples(samples), **facts))

    with own("02", bench, flags) as alone:
        for ending in ("", APPENDIX):
            with served(bench, ending, sizes) as server:
                for users in USERS[:least]:
                    work = closed(max(4, users), QUESTION, 8 if quick else ANSWER)
                    ask(PHASE + ending, server, work, users=users)
                    if users == many and not ending:
                        ask(ALONE, alone, work, users=users)
                for length in PROMPTS[:least]:
                    work = closed(8, length, SHORT)
                    ask(LENGTHS + ending, server, work, users=8, prompt=length)
    return runs


def own(phase: str, bench: Bench, options: dict[str, Any]) -> Started:
    """Return phase 13's server by itself, with the engine of `phase` and these options of it."""
    return Started("-m", "benchmarks.own_server", phase, bench.name, json.dumps(options))


def served(bench: Bench, ending: str, options: dict[str, Any]) -> Started:
    """Return phase 13's server: by itself, or with the appendix (`ending`), which is `ladder serve`."""
    return Server(bench.name, **options) if ending else own(PHASE, bench, options)


def cpu_dtype(asked: torch.dtype) -> torch.dtype:
    """Return bfloat16 if the processor multiplies it, else `asked`; both servers compute in this dtype."""
    return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else asked


def closed(requests: int, prompt: int, output: int) -> Workload:
    """Return a workload of `requests` requests, of `prompt` tokens and `output` tokens to generate each.

    Workloads have different tokens, so that a prefix cache finds nothing.
    """
    return uniform(
        f"closed-{requests}x{prompt}+{output}",
        requests,
        prompt,
        output,
        seed=1000 * requests + prompt,
    )


# GPU.


def on_cuda(options: BenchOptions) -> list[Run]:
    """`offline-256` with and without HTTP, one user with and without; with the appendix arrivals as well."""
    runs = []
    for ending in ("", APPENDIX):
        bench = OnCuda(options, ending)
        sizes = {**bench.engine_options(), "dtype": bench.dtype_name, "speculate": False}
        with served(bench, ending, sizes) as server:
            runs += [*bench.throughput(server), *bench.first_token(server)]
            runs += bench.arrivals(server) if ending else []
        del bench
        release_memory(options.device)
    return runs


class OnCuda(Bench):
    """The engine in this process, and the same engine behind a server. ending: of the variants' names."""

    def __init__(self, options: BenchOptions, ending: str) -> None:
        super().__init__(options)
        self.ending = ending
        self.engine = engine_of(f"09{ending}", self.model, **self.engine_options())
        self.shift = 0

    def engine_options(self) -> dict[str, Any]:
        """Return the options of the engine in this process, which the engine behind the server gets, too."""
        return {**SIZES, "cache_bytes": self.kv_bytes(CACHE_TOKENS)}

    def cold(self, work: Workload) -> Workload:
        """Return `work` with other tokens at each call, since engines keep their prefix caches."""
        self.shift += 1
        return work.cold(self.shift)

    def throughput(self, server: Started) -> list[Run]:
        """256 requests at once, from four client processes."""
        work = self.short(workload("offline-256"))
        users = len(work.items)
        variants = {
            ENGINE: lambda _: time_generation(self.engine, self.cold(work), self.device),
            PHASE: lambda _: server.sample(self.cold(work), users=users),
        }
        # No sample is taken again for other processes' work: servers and their clients are such processes.
        return self.compare(variants, work, tries=1, users=users)

    def first_token(self, server: Started) -> list[Run]:
        """One user, who waits for each answer: what the way through two processes adds."""
        work = uniform("one-user-16x128+32", 16, 128, 32)
        sequential = replace(work, sequential=True)
        variants = {
            ENGINE: lambda _: time_replay(self.engine, self.cold(sequential), self.device)[0],
            PHASE: lambda _: server.sample(self.cold(work), users=1, processes=1),
        }
        return self.compare(variants, work, tries=1, users=1)

    def arrivals(self, server: Started) -> list[Run]:
        """Run five workloads, each at 4, 8 and 16 requests per second (with `quick`: one, at one rate)."""
        runs = []
        for name in SERVING[:1] if self.quick else SERVING:
            for rate in RATES[:1] if self.quick else RATES:
                work = workload(name)
                longer = self.repeated(
                    work, max(len(work.items), int(rate * ARRIVING_SECONDS))
                )
                samples = Samples([server.sample(longer, rate=rate)])
                runs.append(self.run_of(ARRIVALS, work, samples, asks=name, rate=rate))
        return runs

    def repeated(self, work: Workload, count: int) -> Workload:
        """Return a workload of `count` requests: those of `work`, repeated, each time with other tokens."""
        items: list[Item] = []
        while len(items) < count:
            prompts = self.cold(work).prompts
            items += [
                Item(tuple(p), item.max_tokens)
                for p, item in zip(prompts, work.items, strict=True)
            ]
        return replace(work, items=tuple(items[:count]), shift=0)


ASKED = {"users": "?*", "prompt": ""}
draw = figure(
    Panel(
        "All users together",
        where=ASKED,
        x="users",
        log="x",
        peers=True,
    ),
    Panel("Each of them: first tokens", "ttft_ms_p50", ASKED, x="users", log="xy", peers=True),
    Panel(
        "First token by the clock",
        "ttft_ms_p99",
        {"variant": f"{ARRIVALS}*"},
        x="rate",
        by="{workload}",
        log="y",
    ),
    Panel(
        "Eight users: first token by the prompt",
        "ttft_ms_p50",
        {"variant": LENGTHS},
        x="prompt",
    ),
    each=("model",),
)
