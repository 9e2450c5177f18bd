"""Replicas: what routing finds, what the way to one costs, how many replicas make how many tokens.

    ladder bench replicas

What is found where a request goes is counted in engines of this process, so that no clock is part of it. What
the way to a replica costs is timed for one user: no way at all, the front without Ray, and Ray Serve where it
is installed. On several GPUs: a replica on each of them, and all policies on prompts that begin alike.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from string import ascii_lowercase
from typing import Any

import msgspec
import torch

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.loadtest.loops import LoadPlan
from benchmarks.loadtest.loops import run as run_plan
from benchmarks.loadtest.user import Target
from benchmarks.measure import Sample, Samples
from benchmarks.plotting import Panel, figure
from benchmarks.published import SIZES
from benchmarks.server import Server, Started, answered, bodies_of, measured
from benchmarks.workloads import Item, Workload, uniform, workload
from common.request import Request
from common.sampling.params import SamplingParams
from forward import load_model
from forward.shapes import SHAPES
from paged_cache import PagedEngine
from prefix_cache import PrefixCache
from replicas.prefixes import chain_of
from replicas.routing import InFlight, make_policy

PHASE = "replicas"
ROUTES = ("round-robin", "least-loaded", "prefix")
PREFIXES = 16
DIRECT = "no router"
FRONT = "replicas, without Ray"
RAY = "replicas, Ray Serve"
GPU_MODEL = "random:qwen3-8b"
"""Of each engine on a GPU, as in phases 09 and 13."""


def run(options: BenchOptions) -> Evidence:
    """What policies find, counted; one user's way; on GPUs replicas by number and policy."""
    bench = Bench(options)
    runs = bench.found()
    with bench.servers(max(1, bench.gpus), **({} if bench.on_cpu else SIZES)) as targets:
        runs += bench.ways(targets[0])
        if bench.gpus:
            runs += bench.scaling(targets)
    if bench.gpus > 1:
        runs += bench.policies()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """What is measured, with which model."""

    def __init__(self, options: BenchOptions) -> None:
        on_cpu = options.device.type != "cuda"
        self.gpus = 0 if on_cpu else torch.cuda.device_count()
        model = options.model or ("random:tiny" if on_cpu else GPU_MODEL)
        super().__init__(replace(options, model=model))
        self.rng = random.Random(1)

    # Counts.

    def found(self) -> list[Run]:
        """Every policy: what is found, and which computes it."""
        return [self.routed(PHASE, route, {"route": route}) for route in ROUTES]

    def routed(self, variant: str, route: str, facts: Mapping[str, Any]) -> Run:
        """Serve 16 users' requests, with 16 beginnings, by four replicas of this process."""
        work = prefixes(12, prefix=256, rest=(16, 48), output=8, vocab=256)
        again = range(self.options.repeats)  # counts are the same each time
        samples = [Simulated(work, route, replicas=4, users=16).sample() for _ in again]
        made = self.run_of(variant, work, Samples(samples), **facts)
        return replace(made, model="tiny", weights="random")

    # One user.

    def ways(self, server: Target) -> list[Run]:
        """First token and gap of one user, straight to a server and on every way there is to it."""
        work = uniform("one-user-24x128+8", 4 if self.quick else 24, 128, 8)
        with ExitStack() as stack:
            ways = {
                DIRECT: server,
                FRONT: stack.enter_context(front([server], "prefix")).target,
            }
            # On a GPU there is no room for another.
            if self.on_cpu and importlib.util.find_spec("ray"):
                ways[RAY] = stack.enter_context(self.server(replicas=1)).target
            asked = {name: partial(self.one_user, way, work) for name, way in ways.items()}
            return self.compare(asked, work, users=1)

    def one_user(self, target: Target, work: Workload, repeat: int) -> Sample:
        """Requests one after the other. Letters, as not every router takes ids, and never the same twice:
        several ways lead to one server, which would find what the way before has left."""
        bodies = bodies_of(work)
        for body in bodies:
            letters = self.rng.choices(ascii_lowercase, k=len(body["prompt"]))
            body |= {"model": self.name, "prompt": "".join(letters)}
        return answered(run_plan(target, LoadPlan(bodies, len(bodies), users=1), processes=1))

    def server(self, gpu: int | None = None, **more: Any) -> Server:
        """A server as every variant has it."""
        size = {"max_rows": 16, "cache_bytes": 8 << 20} if self.on_cpu else {}
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return Server(
            self.name,
            env=env,
            device=self.device.type,
            dtype=self.dtype_name,
            **size,
            **more,
        )

    # Several GPUs.

    def scaling(self, targets: Sequence[Target]) -> list[Run]:
        """1, 2, 4 replicas behind the front, each with 256 users' worth of requests."""
        runs = []
        for count in [n for n in (1, 2, 4, 8) if n <= len(targets)]:
            work = crowd(count)
            with front(targets[:count], "least-loaded") as router:
                target = router.target
                measured(target, work.first(32).cold(100 * count + 99), users=32)
                samples = [
                    measured(
                        target, work.cold(100 * count + n), users=256 * count, processes=8
                    )
                    for n in range(self.options.repeats)
                ]
            runs.append(self.run_of(PHASE, work, Samples(samples), replicas=count))
        return runs

    def policies(self) -> list[Run]:
        """16 beginnings of which no replica can keep all: every policy."""
        count = max(n for n in (2, 4, 8) if n <= self.gpus)
        work = prefixes(24, prefix=1024, rest=(32, 128), output=64)
        config = SHAPES[self.name.removeprefix("random:")]
        # What each request has for itself, and in all replicas together once what is shared, a quarter to
        # spare. With room for all beginnings everywhere it would not matter which knows what.
        tokens = 32 * 256 + PREFIXES * 1024 * 5 // (4 * count)
        size = {
            "cache_bytes": tokens * config.kv_bytes_per_token(self.dtype),
            "max_rows": 32,
        }
        runs, shift = [], 0
        with self.servers(count, **size) as targets:
            for route in ROUTES:
                samples = []
                with front(targets, route) as router:
                    for _ in range(1 + self.options.repeats):  # the first warms up
                        shift += 1
                        cold = work.cold(shift)
                        samples.append(measured(router.target, cold, users=24 * count))
                kept = Samples(samples[1:])
                runs.append(self.run_of(PHASE, work, kept, replicas=count, route=route))
        return runs

    @contextmanager
    def servers(self, count: int, **more: Any) -> Iterator[list[Target]]:
        """So many servers, a GPU each; they start at the same time."""
        started = [self.server(None if self.on_cpu else gpu, **more) for gpu in range(count)]
        with ExitStack() as stack:
            yield [stack.enter_context(server).target for server in started]


def prefixes(
    each: int, *, prefix: int, rest: tuple[int, int], output: int, vocab: int = 10_000
) -> Workload:
    """`prefix_caching` with 16 beginnings instead of one, `each` requests of each, in any order."""
    rng = random.Random(16)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    starts = [tokens(prefix) for _ in range(PREFIXES)]
    items = [
        Item(start + tokens(rng.randint(*rest)), output)
        for start in starts
        for _ in range(each)
    ]
    rng.shuffle(items)
    return Workload(f"prefix_caching-{PREFIXES}x{each}-{prefix}", tuple(items), vocab=vocab)


def crowd(replicas: int) -> Workload:
    """`offline-256` once for each replica, with other tokens each time."""
    one = workload("offline-256")
    if replicas == 1:
        return one
    items = [
        replace(item, prompt=tuple((token + 7 * copy) % one.vocab for token in item.prompt))
        for copy in range(replicas)
        for item in one.items
    ]
    return replace(one, name=f"offline-256 x {replicas}", items=tuple(items))


# Counting.


@dataclass
class Asked:
    """A request of the simulation. arrived, first: times of its replica's clock."""

    request: Request
    replica: str
    arrived: int
    first: int = 0


class Simulated:
    """Replicas that take turns, a step each, so that what happens is the same on every machine.

    A replica's clock is the tokens that it has computed. Users wait for their answer before they ask again.
    """

    def __init__(self, work: Workload, route: str, replicas: int, users: int) -> None:
        model = load_model("random:tiny")
        # Room for all users at one replica, and for a third of the beginnings besides: nothing is evicted.
        room = (users + PREFIXES // 3) * 320 * model.config.kv_bytes_per_token(model.dtype)
        names = [f"r{n}" for n in range(replicas)]
        self.engines = {
            name: engine_of(
                "09", model, max_rows=users, step_tokens=256, cache_bytes=room, graphs=False
            )
            for name in names
        }
        self.policy = make_policy(route, 8)
        self.flight = InFlight()
        self.users = users
        self.waiting = bodies_of(work)
        self.open: dict[str, Asked] = {}
        self.done: list[Asked] = []
        self.imbalance = 0

    def sample(self) -> Sample:
        """Run to the end, and count."""
        started = time.perf_counter()
        while self.waiting or self.open:
            while self.waiting and len(self.open) < self.users:
                self._ask(self.waiting.pop(0))
            for name, engine in self.engines.items():
                if not engine.idle:
                    self._step(name, engine)
        computed = [engine.stats.computed_tokens for engine in self.engines.values()]
        caches = [engine.cache for engine in self.engines.values()]
        stats = [cache.stats for cache in caches if isinstance(cache, PrefixCache)]
        waits = [float(one.first - one.arrived) for one in self.done]
        return {
            "seconds": time.perf_counter() - started,
            "cache_hit_fraction": sum(s.hit_tokens for s in stats)
            / sum(s.lookup_tokens for s in stats),
            "computed_tokens": float(sum(computed)),
            "busiest_computed_tokens": float(max(computed)),
            "imbalance": float(self.imbalance),
            "first_token_after_tokens": median(waits),
        }

    def _ask(self, body: dict[str, Any]) -> None:
        loads = {name: self.flight.of(name) for name in self.engines}
        chain = chain_of(msgspec.json.encode(body))
        name = self.policy.rank(chain, loads)[0]
        self.policy.sent(chain, name)
        number = str(len(self.open) + len(self.done))
        self.flight.begin(number, name)
        self.imbalance = max(self.imbalance, loads[name] - min(loads.values()))
        engine = self.engines[name]
        params = SamplingParams(
            max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True
        )
        (request,) = engine.add(body["prompt"], params)
        self.open[number] = Asked(request, name, engine.stats.computed_tokens)

    def _step(self, name: str, engine: PagedEngine) -> None:
        engine.step()
        for key, asked in list(self.open.items()):
            if asked.replica != name:
                continue
            if not asked.first and asked.request.output_ids:
                asked.first = engine.stats.computed_tokens
            if asked.request.finish_reason is not None:
                self.flight.end(key)
                self.done.append(self.open.pop(key))


def front(targets: Sequence[Target], route: str) -> Started:
    """Our front before servers."""
    urls = [f"http://{target.host}:{target.port}" for target in targets]
    return Started("-m", "benchmarks.router", *urls, "--route", route, "--port", "0")


ROUTED = "{variant} {route}"
draw = figure(
    Panel(
        "256 requests for each replica",
        "output_tokens_per_s",
        {"workload": "offline-256*"},
        x="replicas",
        relative=True,
    ),
    Panel(
        "16 beginnings, more than a replica keeps",
        "output_tokens_per_s",
        {"workload": "prefix*"},
        label=ROUTED,
    ),
    Panel(
        "16 beginnings, 4 replicas: what each policy computes", "computed_tokens", label=ROUTED
    ),
    Panel("One user's first token, on each way", "ttft_ms_p50", {"users": "1"}),
    rows=2,
    phase="15_replicas",
)
