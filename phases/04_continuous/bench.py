"""Phase 04 against phase 03: what it is worth to let requests join and leave at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import batching
import benchmarks.bench
import continuous
from benchmarks.evidence import Run
from benchmarks.measure import Sample, Samples, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
from benchmarks.workloads import Item, Workload, uniform, workload
from common.events import Streams
from kv_cache import KVCache

PHASE = "04_continuous"
BEFORE = "03_batching"
COMPACT = "03_batching+compact"
SEQUENTIAL = "04_continuous, 1 row"
ROWS = 8
"""Rows of 04 and batch size of 03 for the skewed outputs: four batches' worth of requests."""
MIXED = ((24, 8), (160, 12), (40, 48), (12, 24), (96, 16), (56, 40), (200, 8), (32, 32))
"""Prompt and output lengths of the eight mixed requests."""


class Bench(benchmarks.bench.Bench):
    """Measurements of phase 04 beside phase 03, over one model."""

    phase = PHASE

    def measured(self) -> list[Run]:
        """Measure unequal outputs, eight mixed requests, then requests that arrive over time."""
        return self.skewed() + self.mixed() + self.traces()

    def skewed(self) -> list[Run]:
        """Measure phases 03 and 04 on outputs of which most are short and every eighth is long.

        03 runs plain and compacting (finished rows are dropped); 04 has no more bytes of KV cache than 03.
        03 makes a cache for each batch, as long as its longest prompt and longest output together; 04 has as
        many rows as a batch, each as long as the longest request.
        """
        work = self.short(workload("skewed-outputs-small"))
        batches = [work.items[at : at + ROWS] for at in range(0, len(work.items), ROWS)]
        columns = max(map(batch_columns, batches))
        static = KVCache.bytes_needed(self.config, ROWS, columns, self.dtype)
        length = longest(work)
        # The phase before comes first, so that a table's gains are over it.
        engines: dict[str, tuple[Streams, int]] = {
            BEFORE: (batching.load(self.model, batch_size=ROWS), static),
            COMPACT: (batching.load(self.model, batch_size=ROWS, compact=True), static),
            PHASE: (
                continuous.load(self.model, max_rows=ROWS, max_len=length),
                self.kv_bytes(ROWS * length),
            ),
        }
        warm = {name: engine for name, (engine, _) in engines.items()}
        self.warm_up(warm, uniform("warm-up", ROWS, 32, 4))

        def sample(engine: Streams, size: int, repeat: int) -> Sample:
            timed = time_generation(engine, work.cold(repeat), self.device)
            return {**timed, "kv_cache_bytes": float(size)}

        timed = {name: partial(sample, *made) for name, made in engines.items()}
        return self.compare(timed, work, ROWS, warm={}, batch=ROWS)

    def mixed(self) -> list[Run]:
        """Measure eight requests of unequal lengths that arrive at once, in eight rows and in one.

        A request's gain is how many times sooner it ends with eight rows.
        """
        items = [
            Item(uniform("", 1, prompt, 1, seed=number).items[0].prompt, output)
            for number, (prompt, output) in enumerate(MIXED)
        ]
        work = self.short(Workload("mixed-8", tuple(items), vocab=10_000))
        return self.replays(work, {SEQUENTIAL: 1, PHASE: len(items)}, roofline=True)

    def traces(self) -> list[Run]:
        """Measure requests that arrive at random times, all at once, and evenly."""
        poisson = self.short(workload(f"continuous_batching{self.small}"))
        runs = []
        for trace, work in {
            "poisson": poisson,
            "burst": arriving(poisson, "burst", 0.0),
            "steady": arriving(poisson, "steady", 0.5 if self.on_cpu else 0.25),
        }.items():
            alone = {SEQUENTIAL: 1} if trace == "poisson" and self.on_cpu else {}
            runs += self.replays(work, {**alone, PHASE: 16}, trace=trace)
        return runs

    def replays(
        self, work: Workload, rows: Mapping[str, int], roofline: bool = False, **facts: Any
    ) -> list[Run]:
        """Replay the requests of `work` in an engine for each variant, and return a run for each.

        rows: by variant, the rows of its engine. If `SEQUENTIAL` is among them, `PHASE` gets each request's
            gain over it. roofline: True to compare with the roofline of as many rows. facts: more fields.
        """
        engines = {
            name: continuous.load(self.model, max_rows=count, max_len=longest(work))
            for name, count in rows.items()
        }
        self.warm_up(engines)

        def sample(name: str, repeat: int) -> Sample:
            timed, done = time_replay(engines[name], work.cold(repeat), self.device)
            return timed | {f"e2e_ms_request_{one.index}": one.e2e_ms or 0.0 for one in done}

        timed = {name: partial(sample, name) for name in engines}
        kept = alternate(timed, self.options.repeats, warm={})
        if SEQUENTIAL in kept:
            add_gains(kept[SEQUENTIAL], kept[PHASE])
        return [
            self.run_of(name, work, found, rows[name] * roofline, rows=rows[name], **facts)
            for name, found in kept.items()
        ]


def longest(work: Workload) -> int:
    """Return the tokens of the longest request, prompt and output."""
    return max(len(item.prompt) + item.max_tokens for item in work.items)


def batch_columns(items: Sequence[Item]) -> int:
    """Return the tokens of a row of 03's cache for a batch: longest prompt and longest output, less one."""
    return max(len(item.prompt) for item in items) + max(item.max_tokens for item in items) - 1


def arriving(work: Workload, pattern: str, gap: float) -> Workload:
    """Return the same requests, arriving one every `gap` seconds; `pattern` is added to the name."""
    items = tuple(
        replace(item, arrival=number * gap) for number, item in enumerate(work.items)
    )
    return replace(work, name=f"{work.name} ({pattern})", items=items)


def add_gains(before: Samples, after: Samples) -> None:
    """Add to `after`'s samples, as `gain_...`, how many times sooner each request ended than in `before`.

    Their least, median and largest are added, too.
    """
    for old, new in zip(cycle(before.kept), after.kept, strict=False):
        gains = {f"gain_{k}": old[k] / new[k] for k in old if k.startswith("e2e_ms_request_")}
        new |= gains
        for name, of in (("least", min), ("median", median), ("most", max)):
            new[f"gain_{name}"] = of(gains.values())


run = Bench.run
SKEWED = {"workload": "skewed*"}
draw = figure(
    Panel("{gain} the tokens when rows are filled again at once", where=SKEWED),
    Panel("First tokens come sooner", "ttft_ms_mean", SKEWED),
)
