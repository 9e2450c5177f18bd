"""Phase 15: four replicas behind a router that knows prefixes, against four that are filled evenly.

Engines of this process take turns, a step each, and tokens are counted: no clock is part of it. Then one
user's first token on each way to a server. `ladder bench replicas` measures more: throughput by the number of
GPUs.
"""

from __future__ import annotations

from benchmarks import replicas
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence

PHASE, BEFORE = "15_replicas", "13_serving, copies"
ROUTES = {BEFORE: "least-loaded", PHASE: "prefix"}


def run(options: BenchOptions) -> Evidence:
    """Count what each policy computes, then time one user on each way."""
    bench = replicas.Bench(options)
    runs = [
        bench.routed(variant, route, {"route": route} if variant == PHASE else {})
        for variant, route in ROUTES.items()
    ]
    with bench.servers(1) as targets:
        runs += bench.ways(targets[0])
    return evidence_of(PHASE, runs, options)


draw = replicas.draw
