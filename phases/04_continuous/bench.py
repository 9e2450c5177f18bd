"""Phase 04 against phase 03: what it is worth to let requests join and leave at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import batching
import benchmarks.bench
import continuous
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, uniform, workload
from common.events import Completion, Streams
from kv_cache import KVCache

PHASE = "04_continuous"
BEFORE = "03_batching"
COMPACT = "03_batching+compact"
SEQUENTIAL = "04_continuous, 1 row"
ROWS = 8
"""Rows of 04 and batch size of 03 for the skewed outputs: four batches' worth of requests."""
MIXED = ((24, 8), (160, 12), (40, 48), (12, 24), (96, 16), (56, 40), (200, 8), (32, 32))
"""Prompt and output lengths of the eight mixed requests."""


def run(options: BenchOptions) -> Evidence:
    """Unequal outputs, eight mixed requests, then requests that arrive over time."""
    runs = []
    for target in targets(options):
        bench = Bench(target)
        runs += bench.skewed() + bench.mixed() + bench.traces()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """Both phases over one model."""

    def skewed(self) -> list[Run]:
        """Most outputs short, every eighth long: 03 plain and compacted, and 04, with no more KV bytes.

        03 makes a cache for each batch, as long as its longest prompt and longest output together; 04 has as
        many rows as a batch, each as long as the longest request.
        """
        work, rows = workload("skewed-outputs-small"), ROWS
        if self.quick:
            rows = 4
            items = [Item(item.prompt, item.max_tokens // 8 + 1) for item in work.items[:16]]
            work = replace(work, name=f"{work.name}[:16]/8", items=tuple(items))
        batches = [work.items[at : at + rows] for at in range(0, len(work.items), rows)]
        static = KVCache.bytes_needed(
            self.config, rows, max(map(batch_columns, batches)), self.dtype
        )
        length = longest(work)
        # The phase before comes first, so that a table's gains are over it.
        engines: dict[str, tuple[Streams, int]] = {
            BEFORE: (batching.load(self.model, batch_size=rows), static),
            COMPACT: (batching.load(self.model, batch_size=rows, compact=True), static),
            PHASE: (
                continuous.load(self.model, max_rows=rows, max_len=length),
                rows * length * self.config.kv_bytes_per_token(self.dtype),
            ),
        }
        self.warm_up(
            {name: engine for name, (engine, _) in engines.items()},
            uniform("warm-up", rows, 32, 4),
        )

        def measure(engine: Streams, size: int) -> Callable[[int], Sample]:
            def sample(repeat: int) -> Sample:
                timed = time_generation(engine, work.cold(repeat), self.device)
                return {**timed, "kv_cache_bytes": float(size)}

            return sample

        timed = {name: measure(*made) for name, made in engines.items()}
        return self.compare(timed, work, rows, warm={}, batch=rows)

    def replayed(self, rows: int, work: Workload) -> Callable[[int], Sample]:
        """Time a replay in an engine of so many rows, and when each request ended."""
        engine = continuous.load(self.model, max_rows=rows, max_len=longest(work))
        self.warm_up({"": engine})

        def sample(repeat: int) -> Sample:
            timed, done = time_replay(engine, work.cold(repeat), self.device)
            return {**timed, **ends(done)}

        return sample

    def mixed(self) -> list[Run]:
        """Eight requests of unequal lengths at once, together and one after the other; each one's gain."""
        items = [
            Item(uniform("", 1, prompt, 1, seed=number).items[0].prompt, output)
            for number, (prompt, output) in enumerate(MIXED)
        ]
        if self.quick:
            items = [Item(item.prompt[:16], item.max_tokens // 8) for item in items]
        work = Workload("mixed-8", tuple(items), vocab=10_000)
        rows = {SEQUENTIAL: 1, PHASE: len(items)}
        timed = {name: self.replayed(count, work) for name, count in rows.items()}
        kept = alternate(timed, self.options.repeats)
        add_gains(kept[SEQUENTIAL], kept[PHASE])
        return [
            self.run_of(v, work, samples, rows[v], rows=rows[v]) for v, samples in kept.items()
        ]

    def traces(self) -> list[Run]:
        """Requests that arrive over time: at random, all at once, and evenly."""
        poisson = workload(f"continuous_batching{self.small}")
        gap = 0.5 if self.on_cpu else 0.25
        if self.quick:
            poisson = poisson.first(3)
        runs = []
        for trace, work in {
            "poisson": poisson,
            "burst": arriving(poisson, "burst", 0.0),
            "steady": arriving(poisson, "steady", gap),
        }.items():
            rows = {PHASE: 16}
            if trace == "poisson" and self.on_cpu:
                rows[SEQUENTIAL] = 1
            timed = {name: self.replayed(count, work) for name, count in rows.items()}
            kept = alternate(timed, max(1, self.options.repeats // 2), warm={})
            if SEQUENTIAL in kept:
                add_gains(kept[SEQUENTIAL], kept[PHASE])
            runs += [
                self.run_of(v, work, samples, trace=trace, rows=rows[v])
                for v, samples in kept.items()
            ]
        return runs


def longest(work: Workload) -> int:
    """Tokens of the longest request."""
    return max(len(item.prompt) + item.max_tokens for item in work.items)


def batch_columns(items: Sequence[Item]) -> int:
    """Columns of 03's cache for one batch: prompts padded to the longest, then the outputs but one token."""
    return max(len(item.prompt) for item in items) + max(item.max_tokens for item in items) - 1


def arriving(work: Workload, pattern: str, gap: float) -> Workload:
    """The same requests, one every `gap` seconds."""
    items = tuple(
        replace(item, arrival=number * gap) for number, item in enumerate(work.items)
    )
    return replace(work, name=f"{work.name} ({pattern})", items=items)


def ends(completions: Sequence[Completion]) -> Sample:
    """Each request's time from arrival to its last token: `e2e_ms_request_0`, `_1`, ..."""
    return {f"e2e_ms_request_{c.index}": c.e2e_ms for c in completions if c.e2e_ms is not None}


def add_gains(before: Samples, after: Samples) -> None:
    """Add to `after`'s samples how many times sooner each request ended than in `before`."""
    for old, new in zip(before.kept, after.kept, strict=True):
        gains = {f"gain_{k}": old[k] / new[k] for k in old if k.startswith("e2e_ms_request_")}
        new |= gains
        for name, of in (("least", min), ("median", median), ("most", max)):
            new[f"gain_{name}"] = of(gains.values())


SKEWED = {"workload": "skewed*"}
draw = figure(
    Panel("{gain} the tokens when rows are filled again at once", where=SKEWED),
    Panel("First tokens come sooner", "ttft_ms_mean", SKEWED),
)
