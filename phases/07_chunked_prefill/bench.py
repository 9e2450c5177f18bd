"""Phase 07 against phase 05: what a long prompt costs those being served, and what a budget changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import benchmarks.bench
import chunked_prefill
import paged_cache
from benchmarks.evidence import Run
from benchmarks.measure import Sample, percentiles
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
from benchmarks.workloads import Item, Workload, uniform, workload
from common.events import Completion
from paged_cache import PagedEngine

PHASE, BEFORE = "07_chunked_prefill", "05_paged_cache"
BUDGET = 128
"""The budget of the comparison with phase 05."""


@dataclass(frozen=True)
class Size:
    """Sizes of the workloads on one kind of machine (`CPU`, `GPU`, or `QUICK` for a trial).

    decodes, outputs: requests in flight and the tokens each generates.
    prompts, every: lengths of the prompts that arrive meanwhile, one for every `every` tokens of the decodes.
    burst: lengths of the prompts that arrive together in the comparison of policies.
    budgets, policy_budget, clock_budget: most tokens of a step (`step_tokens`) in the sweep of budgets, in
        the comparison of policies, and where requests arrive by the clock.
    max_len: of the engines. room: tokens of their caches, so many that no request is preempted.
    """

    decodes: int
    outputs: int
    prompts: tuple[int, ...]
    every: int
    burst: tuple[int, ...]
    budgets: tuple[int, ...]
    policy_budget: int
    clock_budget: int
    max_len: int
    room: int


CPU = Size(
    8, 64, (1024,) * 3, 16, (1024, 128, 512, 64, 768, 256), (32, 64, 128, 256, 512), 128, 128, 2048, 32_768
)  # fmt: skip
GPU = Size(
    16, 96, (8192,) * 3, 24, (8192, 1024, 4096, 512, 6144, 2048), (128, 512, 2048), 512, 2048, 16_384, 160_000
)  # fmt: skip
QUICK = Size(4, 16, (96,) * 2, 4, (96, 16, 48), (32, 128), 32, 128, 512, 8192)


def decodes_and_prompts(
    size: Size, prompts: tuple[int, ...], name: str, vocab: int = 10_000
) -> Workload:
    """Return a workload of short prompts with long outputs, then prompts of these lengths with 16 tokens.

    size: how many short prompts, and the length of their outputs. vocab: token ids are below this.
    """
    rng = random.Random(0)
    shapes = [(32, size.outputs)] * size.decodes + [(length, 16) for length in prompts]
    items = [
        Item(tuple(rng.randrange(vocab) for _ in range(length)), output)
        for length, output in shapes
    ]
    return Workload(name, tuple(items), vocab=vocab)


def stalled_fraction(completions: list[Completion]) -> float:
    """Return the share of gaps between tokens that lasted more than twice as long as the median gap."""
    gaps = [gap for completion in completions for gap in completion.itl_ms]
    return sum(gap > 2 * median(gaps) for gap in gaps) / len(gaps)


Make = Callable[[], PagedEngine]


class Bench(benchmarks.bench.Bench):
    """Measurements of phase 07 beside phase 05, over one model."""

    phase = PHASE

    @property
    def size(self) -> Size:
        """Return the sizes of the workloads on this machine."""
        return QUICK if self.quick else CPU if self.on_cpu else GPU

    def measured(self) -> list[Run]:
        """Measure long prompts among decodes at several budgets, policies, and requests over time."""
        return self.stalls() + self.policies() + self.arrivals()

    def stalls(self) -> list[Run]:
        """Measure phase 05, and phase 07 at several budgets, while long prompts arrive among decodes.

        A prompt arrives when the decodes have got some more tokens, not at some second, so that it meets the
        same decodes on any machine. Phase 05 and 07 at `BUDGET` take turns; the other budgets come after.
        """
        size = self.size
        name = f"decodes-{size.decodes}-prompts-{size.prompts[0]}-every-{size.every}"
        work = decodes_and_prompts(size, size.prompts, name)
        main: dict[str, Make] = {BEFORE: self.before, PHASE: partial(self.after, BUDGET)}
        runs = self.under_load(main, work, self.options.repeats)
        for budget in size.budgets:
            swept = {PHASE: partial(self.after, budget)}
            runs += self.under_load(swept, work, budget=budget)
        return runs

    def policies(self) -> list[Run]:
        """Measure each scheduling policy on prompts of all lengths that arrive together."""
        size = self.size
        name = f"decodes-{size.decodes}-burst-{len(size.burst)}"
        work = decodes_and_prompts(size, size.burst, name)
        budget, chunk = size.policy_budget, size.policy_budget // 4
        runs = self.under_load({BEFORE: self.before}, work, policy="whole prompts")
        policies: dict[str, dict[str, Any]] = {
            "fcfs": {},
            "shortest first": {"policy": "shortest_first"},
            f"fcfs, chunks of {chunk}": {"chunk_tokens": chunk},
        }
        for policy, more in policies.items():
            made = {PHASE: partial(self.after, budget, **more)}
            runs += self.under_load(made, work, policy=policy, at_budget=budget)
        return runs

    def arrivals(self) -> list[Run]:
        """Measure phases 05 and 07 on a workload of 75 % long prompts that arrive by the clock."""
        work = self.short(workload(f"chunked_prefill{self.small}"))
        budget = self.size.clock_budget

        def sample(make: Make, repeat: int) -> Sample:
            found, done = time_replay(make(), work.cold(repeat), self.device)
            return {**found, "stalled_fraction": stalled_fraction(done)}

        made: dict[str, Make] = {BEFORE: self.before, PHASE: partial(self.after, budget)}
        timed = {name: partial(sample, make) for name, make in made.items()}
        return self.compare(timed, work, repeats=1, at_budget={BEFORE: None, PHASE: budget})

    # Engines and samples.

    def before(self) -> PagedEngine:
        """Return an engine of phase 05: prompts that wait go into one step, up to `2 * max_len` tokens."""
        return paged_cache.load(self.model, step_tokens=2 * self.size.max_len, **self.room())

    def after(self, budget: int, **options: Any) -> PagedEngine:
        """Return an engine of phase 07 with `step_tokens=budget` and these options."""
        return chunked_prefill.load(self.model, step_tokens=budget, **options, **self.room())

    def room(self) -> dict[str, Any]:
        """Return the options that all engines share: requests, tokens of a request, and bytes of cache."""
        size = self.size
        bytes_ = self.kv_bytes(size.room)
        return {"max_rows": 64, "max_len": size.max_len, "cache_bytes": bytes_}

    def under_load(
        self, made: Mapping[str, Make], work: Workload, repeats: int = 0, **facts: Any
    ) -> list[Run]:
        """Measure engines on `work`: its decodes first, then each prompt in its turn; return a run for each.

        TTFT (time to first token) is that of the prompts. made: by variant, a function that makes its engine.
        repeats: by default one on a CPU, where a few tokens are warm-up enough. facts: more fields of a run.
        """
        size, burst = self.size, "burst" in work.name

        def timed(make: Make, repeat: int) -> Sample:
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
            gaps = {"stalled_fraction": stalled_fraction(ended)}
            return {**sample, **percentiles("ttft_ms", waits), **gaps}

        variants = {name: partial(timed, make) for name, make in made.items()}
        warm: dict[str, Any] | None = None
        if self.on_cpu:
            time_replay(self.after(BUDGET), uniform("warm-up", 2, 64, 2))
            warm, repeats = {}, repeats or 1
        return self.compare(
            variants, work, len(work.items), repeats=repeats, warm=warm, **facts
        )


run = Bench.run
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
