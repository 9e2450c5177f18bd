"""Phase 07 against phase 05: what a long prompt costs those being served, and what a budget changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import benchmarks.bench
import chunked_prefill
import paged_cache
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate, percentiles
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, uniform, workload
from common.events import Completion
from paged_cache import PagedEngine

PHASE, BEFORE = "07_chunked_prefill", "05_paged_cache"
BUDGET = 128
"""The budget of the comparison with phase 05."""
SHARES = (1, 5, 10, 25, 50, 75, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99)
"""Percentiles of the gaps that the picture of their distribution is drawn from."""


@dataclass(frozen=True)
class Size:
    """A machine's share of the work.

    decodes, outputs: requests in flight and the tokens each generates.
    prompts, every: lengths of the prompts that arrive meanwhile, one for every `every` tokens of the decodes.
    burst: lengths of the prompts that arrive together in the comparison of policies.
    budgets: of the sweep. policy_budget: of the comparison of policies.
    max_len: of the engines.
    """

    decodes: int
    outputs: int
    prompts: tuple[int, ...]
    every: int
    burst: tuple[int, ...]
    budgets: tuple[int, ...]
    policy_budget: int
    max_len: int


CPU = Size(
    8, 64, (1024,) * 3, 16, (1024, 128, 512, 64, 768, 256), (32, 64, 128, 256, 512), 128, 2048
)
GPU = Size(
    16, 96, (8192,) * 3, 24, (8192, 1024, 4096, 512, 6144, 2048), (128, 512, 2048), 512, 16_384
)
QUICK = Size(4, 16, (96,) * 2, 4, (96, 16, 48), (32, 128), 32, 512)


def run(options: BenchOptions) -> Evidence:
    """Decodes meet long prompts; then budgets, policies, and a workload with arrivals."""
    runs = []
    for target in targets(options):
        bench = Bench(target)
        runs += bench.stalls() + bench.policies() + bench.arrivals()
    return evidence_of(PHASE, runs, options)


def decodes_and_prompts(
    size: Size, prompts: tuple[int, ...], name: str, vocab: int = 10_000
) -> Workload:
    """Short prompts that generate for long, and then prompts of these lengths that generate 16 tokens."""
    rng = random.Random(0)
    shapes = [(32, size.outputs)] * size.decodes + [(length, 16) for length in prompts]
    items = [
        Item(tuple(rng.randrange(vocab) for _ in range(length)), output)
        for length, output in shapes
    ]
    return Workload(name, tuple(items), vocab=vocab)


def stalled_fraction(completions: list[Completion]) -> float:
    """The share of gaps between tokens that lasted more than twice as long as the median gap."""
    gaps = [gap for completion in completions for gap in completion.itl_ms]
    return sum(gap > 2 * median(gaps) for gap in gaps) / len(gaps)


def gap_quantiles(completions: list[Completion]) -> Sample:
    """All gaps between tokens as `itl_ms_p1` to `itl_ms_p99`: two percentiles hide what lies between them."""
    gaps = [gap for completion in completions for gap in completion.itl_ms]
    return {f"itl_ms_p{share}": float(np.percentile(gaps, share)) for share in SHARES}


class Bench(benchmarks.bench.Bench):
    """Both phases over one model."""

    @property
    def size(self) -> Size:
        """This machine's share of the work."""
        return QUICK if self.quick else CPU if self.on_cpu else GPU

    def stalls(self) -> list[Run]:
        """Long prompts arrive while others decode: phase 05, and this phase at several budgets.

        A prompt arrives when the decodes have got some more tokens, not at some second, so that the same
        meets the same on any machine. The two that are compared take turns; the sweep's rest comes after.
        """
        size = self.size
        work = decodes_and_prompts(
            size,
            size.prompts,
            f"decodes-{size.decodes}-prompts-{size.prompts[0]}-every-{size.every}",
        )
        variants = {BEFORE: self.under_load(self.before, work)}
        for budget in size.budgets:
            variants[str(budget)] = self.under_load(partial(self.after, budget), work)
        main = {name: variants.pop(name) for name in (BEFORE, str(BUDGET))}
        kept = self.take(main, self.options.repeats)
        kept |= self.take(variants, 1 if self.on_cpu else self.options.repeats)
        count = len(work.items)
        runs = [self.run_of(BEFORE, work, kept[BEFORE], count)]
        runs.append(self.run_of(PHASE, work, kept[str(BUDGET)], count))
        return runs + [
            self.run_of(PHASE, work, kept[str(b)], count, budget=b) for b in size.budgets
        ]

    def policies(self) -> list[Run]:
        """Prompts of all lengths arrive together: which wait for which, under each policy?"""
        size = self.size
        work = decodes_and_prompts(
            size, size.burst, f"decodes-{size.decodes}-burst-{len(size.burst)}"
        )
        budget, chunk = size.policy_budget, size.policy_budget // 4
        made: dict[str, Callable[[], PagedEngine]] = {
            "whole prompts": self.before,
            "fcfs": partial(self.after, budget),
            "shortest first": partial(self.after, budget, policy="shortest_first"),
            f"fcfs, chunks of {chunk}": partial(self.after, budget, chunk_tokens=chunk),
        }
        kept = self.take(
            {name: self.under_load(make, work) for name, make in made.items()},
            1 if self.on_cpu else self.options.repeats,
        )
        count = len(work.items)
        before = self.run_of(
            BEFORE, work, kept.pop("whole prompts"), count, policy="whole prompts"
        )
        return [before] + [
            self.run_of(PHASE, work, found, count, policy=name, at_budget=budget)
            for name, found in kept.items()
        ]

    def arrivals(self) -> list[Run]:
        """The workload with 75 % long prompts, arriving by the clock."""
        work = workload("chunked_prefill-small" if self.on_cpu else "chunked_prefill")
        if self.quick:
            items = [Item(item.prompt[:64], 8, item.arrival / 20) for item in work.items[:6]]
            work = Workload(f"{work.name}[:6]", tuple(items), vocab=work.vocab)
        budget = BUDGET if self.on_cpu else 2048
        made: dict[str, Callable[[], PagedEngine]] = {
            BEFORE: self.before,
            PHASE: partial(self.after, budget),
        }
        kept = self.take(
            {name: self.by_the_clock(make, work) for name, make in made.items()}, 1
        )
        return [
            self.run_of(BEFORE, work, kept[BEFORE]),
            self.run_of(PHASE, work, kept[PHASE], at_budget=budget),
        ]

    # Engines and samples.

    def before(self) -> PagedEngine:
        """Phase 05: all prompts that wait go into one step, if they are not very long."""
        return paged_cache.load(self.model, step_tokens=2 * self.size.max_len, **self.room())

    def after(self, budget: int, **options: Any) -> PagedEngine:
        """Phase 07."""
        return chunked_prefill.load(self.model, step_tokens=budget, **options, **self.room())

    def room(self) -> dict[str, Any]:
        """The same cache for all variants: no request is preempted."""
        tokens = 16 * self.size.max_len if self.on_cpu else 160_000
        size = self.kv_bytes(min(tokens, 64 * self.size.max_len))
        return {"max_rows": 64, "max_len": self.size.max_len, "cache_bytes": size}

    def take(
        self, variants: Mapping[str, Callable[[int], Sample]], repeats: int
    ) -> dict[str, Samples]:
        """Alternate; on a CPU the first steps need no more warming up than a few tokens."""
        if not self.on_cpu:
            return alternate(variants, repeats)
        time_replay(self.after(BUDGET), uniform("warm-up", 2, 64, 2))
        return alternate(variants, repeats, warm={})

    def under_load(
        self, make: Callable[[], PagedEngine], work: Workload
    ) -> Callable[[int], Sample]:
        """A sample has the decodes first, then each prompt in its turn. TTFT is that of these prompts."""
        size, burst = self.size, "burst" in work.name

        def timed(repeat: int) -> Sample:
            engine = make()

            def due(index: int) -> bool:
                if index < size.decodes:
                    return True
                if engine.stats.steps == 0:
                    return False  # the decodes are still in the engine's inbox
                turn = 1 if burst else index - size.decodes + 1
                present = engine.scheduler.running + engine.scheduler.waiting
                done = [
                    len(request.output_ids)
                    for request in present
                    if request.index < size.decodes
                ]
                return not done or min(done) >= turn * size.every

            sample, ended = time_replay(engine, work.cold(repeat), self.device, due)
            waits = [completion.ttft_ms or 0.0 for completion in ended[size.decodes :]]
            gaps = {**gap_quantiles(ended), "stalled_fraction": stalled_fraction(ended)}
            return {**sample, **percentiles("ttft_ms", waits), **gaps}

        return timed

    def by_the_clock(
        self, make: Callable[[], PagedEngine], work: Workload
    ) -> Callable[[int], Sample]:
        """Samples of a workload with arrival times."""

        def timed(repeat: int) -> Sample:
            sample, done = time_replay(make(), work.cold(repeat), self.device)
            return {**sample, "stalled_fraction": stalled_fraction(done)}

        return timed


BUDGETS: dict[str, Any] = {
    "where": {"variant": PHASE},
    "x": "budget",
    "log": "xy",
    "over": {"variant": BEFORE},
}
draw = figure(
    Panel("A larger budget: longer gaps", "itl_ms_p99", **BUDGETS),
    Panel("and earlier first tokens", "ttft_ms_p50", **BUDGETS),
)
