"""Phase 08 against phase 07: what shared beginnings save, what they cost to find, and radix against hash."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

import benchmarks.bench
import chunked_prefill
import prefix_cache
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample
from benchmarks.plotting import bars, lines, panels, save
from benchmarks.replay import time_replay
from benchmarks.targets import targets
from benchmarks.workloads import Item, Workload, uniform, workload
from paged_cache import PagedEngine
from prefix_cache import INDEXES, PrefixCache
from prefix_cache.cache import block_keys
from prefix_cache.index import Key

PHASE = "08_prefix_cache"
BEFORE = "07_chunked_prefill"
HASH = "08_prefix_cache+hash"
INDEX_BLOCKS = (1_000, 10_000, 100_000)
"""Sizes of the index in the comparison of the two kinds."""
SEQUENCE, BLOCK = 64, 16
"""Blocks of a sequence there, and tokens of a block."""

FIRST = "ttft_ms_p50"

Make = Callable[[], PagedEngine]


def run(options: BenchOptions) -> Evidence:
    """A shared prefix, by the clock and all at once; nothing shared; sessions; chats; the indexes alone."""
    runs = []
    for target in targets(options):
        bench = Bench(target)
        runs += bench.shared() + bench.unshared() + bench.sessions()
        runs += index_runs(bench)
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """Both phases over one model."""

    def shared(self) -> list[Run]:
        """Every prompt begins alike: as requests arrive by the clock, and all at once for throughput."""
        work, made = self.short(workload(f"prefix_caching{self.small}")), self.engines()
        repeats = self.options.repeats
        at_once = tuple(replace(item, arrival=0.0) for item in work.items)
        burst = replace(work, name=f"{work.name} (burst)", items=at_once)
        # What says most stands first: a CPU is busy with the arrivals, a large GPU only with the burst.
        if self.on_cpu:
            return self.compare_with(made, work, repeats) + self.compare_with(made, burst, 1)
        return self.compare_with(made, burst, repeats) + self.compare_with(made, work, 1)

    def unshared(self) -> list[Run]:
        """Nothing in common: what looking up, inserting and pinning cost, at least five times."""
        count, prompt, output = (8, 128, 16) if self.on_cpu else (64, 512, 64)
        if self.quick:
            count = 2
            prompt = 32
            output = 4
        work = uniform(f"unshared-{count}x{prompt}+{output}", count, prompt, output)
        made = self.engines() | {HASH: partial(self.after, "hash")}
        repeats = self.options.repeats if self.quick else max(5, self.options.repeats)
        return self.compare_with(made, work, repeats, count)

    def sessions(self) -> list[Run]:
        """Agents whose every turn repeats all that was said, and chats with nothing in common."""
        runs = []
        for name in ("agent-session", "chat-serving-short"):
            runs += self.compare_with(
                self.engines(), self.short(workload(f"{name}{self.small}")), 1
            )
        return runs

    def compare_with(
        self, made: Mapping[str, Make], work: Workload, repeats: int, roofline_batch: int = 0
    ) -> list[Run]:
        """Engines on one workload, after a short warm-up. Arrivals leave idle time: most have no roofline."""
        for make in self.engines().values():
            time_replay(make(), uniform("warm-up", 2, 64, 2), self.device)
        timed = {name: self.timed(make, work) for name, make in made.items()}
        return self.compare(timed, work, roofline_batch, repeats=repeats, warm={})

    def short(self, work: Workload) -> Workload:
        """The workload, or with `--quick` a hurried beginning of it."""
        if not self.quick:
            return work
        items = tuple(Item(item.prompt, 4, item.arrival / 10) for item in work.items[:4])
        return replace(work, name=f"{work.name}[:4]", items=items)

    # Engines and samples.

    def engines(self) -> dict[str, Make]:
        """Phase 07 and this phase, with the same budget and the same cache."""
        return {BEFORE: self.before, PHASE: partial(self.after, "radix")}

    def before(self) -> PagedEngine:
        """Phase 07."""
        return chunked_prefill.load(self.model, **self.sizes())

    def after(self, index: str) -> PagedEngine:
        """This phase."""
        return prefix_cache.load(self.model, index=index, **self.sizes())

    def sizes(self) -> dict[str, Any]:
        """Room for everything: eviction is not what is measured here."""
        if self.on_cpu:
            return {"step_tokens": 256, "max_len": 1024, "cache_bytes": self.kv_bytes(8192)}
        return {"step_tokens": 2048, "max_len": 8192, "cache_bytes": self.kv_bytes(160_000)}

    def timed(self, make: Make, work: Workload) -> Callable[[int], Sample]:
        """Samples of a replay in an engine whose cache is empty, with what was found and saved."""

        def sample(repeat: int) -> Sample:
            engine = make()
            found, _ = time_replay(engine, work.cold(repeat), self.device)
            found["computed_tokens"] = float(engine.stats.computed_tokens)
            if isinstance(engine.cache, PrefixCache):
                stats = engine.cache.stats
                found["cache_hit_fraction"] = stats.hit_rate
                found["tokens_saved"] = float(stats.hit_tokens)
                found["evicted_blocks"] = float(stats.evicted_blocks)
            return found

        return sample


# The two indexes by themselves.


def index_runs(bench: Bench) -> list[Run]:
    """Microseconds of a look-up, an insertion and an eviction, in indexes of growing size.

    Nothing here touches a model or a device; it is Python that runs between two steps.
    """
    runs = []
    for blocks in INDEX_BLOCKS[: 1 if bench.quick else None]:
        for hit in (0.0, 0.5, 1.0):
            work = index_queries(hit, blocks)
            timed = {
                PHASE if kind == "radix" else HASH: partial(index_sample, kind, blocks, work)
                for kind in INDEXES
            }
            facts: dict[str, Any] = {"index_blocks": blocks, "known_share": hit}
            runs += bench.compare(timed, work, warm={}, **facts)
    return runs


def stored_tokens(blocks: int) -> list[list[int]]:
    """Sequences that fill an index with about so many blocks: 16 prompts' worth of common beginnings."""
    rng = random.Random(1)
    quarter = SEQUENCE // 4 * BLOCK
    starts = [[rng.randrange(10_000) for _ in range(quarter)] for _ in range(16)]
    count = max(1, blocks // (SEQUENCE - SEQUENCE // 4))
    return [
        starts[n % 16] + [rng.randrange(10_000) for _ in range(SEQUENCE * BLOCK - quarter)]
        for n in range(count)
    ]


def index_queries(hit: float, blocks: int) -> Workload:
    """32 sequences of 64 blocks, of which the first `hit` are in the index, as a workload with a hash."""
    rng, stored = random.Random(2), stored_tokens(blocks)
    known = round(hit * SEQUENCE) * BLOCK
    items = []
    for query in range(32):
        rest = [10_000 + rng.randrange(10_000) for _ in range(SEQUENCE * BLOCK - known)]
        items.append(Item(tuple(stored[query * 7919 % len(stored)][:known] + rest), 1))
    return Workload("prefix-index", tuple(items), vocab=20_000)


def index_sample(kind: str, blocks: int, work: Workload, repeat: int) -> Sample:
    """Build an index, then time look-ups, insertions and evictions; medians of single calls."""
    index, number_of_block = INDEXES[kind](), 0

    def insert(keys: list[Key]) -> None:
        nonlocal number_of_block
        known = len(index.match(keys, "").blocks)
        cursor: object = index.attach(keys[:known], "")
        new = list(range(number_of_block, number_of_block + len(keys) - known))
        number_of_block += len(new)
        cursor, _, _ = index.extend(cursor, keys[known:], new)
        index.detach(cursor)

    for tokens in stored_tokens(blocks):
        insert(block_keys(tokens, BLOCK))
    start = time.perf_counter()
    queries = [block_keys(prompt, BLOCK) for prompt in work.prompts]
    making = (time.perf_counter() - start) / len(queries)
    lookup = median(_seconds(partial(index.match, keys, "")) for keys in queries)
    inserting = median(_seconds(partial(insert, keys)) for keys in queries)
    evicting = median(_seconds(partial(index.evict, SEQUENCE)) for _ in range(8))
    return {
        "seconds": lookup,
        "keys_us": making * 1e6,
        "lookup_us": lookup * 1e6,
        "insert_us": inserting * 1e6,
        "evict_us": evicting * 1e6,
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Left: first tokens come sooner where beginnings are shared. Right: what a look-up costs."""
    figure, (left, right) = panels(2, height=3.2)
    _first_tokens(evidence, left)
    full = [run for run in evidence.runs if run.options.get("known_share") == 1.0]
    kinds = {PHASE: "radix tree", HASH: "hash chain"}
    lines(
        full,
        x="index_blocks",
        metric="lookup_us",
        axes=right,
        by=lambda run: kinds[run.variant],
        log_x=True,
        log_y=True,
        phase=PHASE,
    )
    right.set_xlabel("blocks in the index")
    right.set_ylabel(f"look-up of {SEQUENCE} known blocks (µs)")
    tree, chain = (
        [run.median("lookup_us") for run in full if run.variant == name] for name in kinds
    )
    times = [slow / fast for fast, slow in zip(tree, chain, strict=True)]
    right.set_title(
        f"A look-up in the tree: {min(times):.0f} to {max(times):.0f} times faster than in the chain"
    )
    save(figure, out, evidence)


def _first_tokens(evidence: Evidence, axes: Axes) -> None:
    names = dict.fromkeys(run.workload for run in evidence.find(BEFORE))
    shared = [name for name in names if "unshared" not in name]
    runs = [evidence.one(variant, name) for name in shared for variant in (BEFORE, PHASE)]
    bars(runs, FIRST, axes=axes, label=lambda run: f"{run.workload}, {run.variant[:2]}")
    pairs = zip(runs[::2], runs[1::2], strict=True)
    sooner = {new.workload: old.median(FIRST) / new.median(FIRST) for old, new in pairs}
    most = max(sooner, key=sooner.__getitem__)
    axes.set_title(
        f"What is found need not be computed: {sooner[most]:.1f} times sooner in {most}"
    )
