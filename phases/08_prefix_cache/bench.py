"""Phase 08 against phase 07: what shared beginnings save, what they cost to find, and radix against hash."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import benchmarks.bench
import chunked_prefill
import prefix_cache
from benchmarks.evidence import Run
from benchmarks.measure import Sample
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
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


class Bench(benchmarks.bench.Bench):
    """Measurements of phase 08 beside phase 07, over one model."""

    phase = PHASE

    def measured(self) -> list[Run]:
        """Measure a shared prefix (by the clock, and at once), none shared, sessions, chats, indexes."""
        repeats = self.options.repeats
        shared = self.short(workload(f"prefix_caching{self.small}"))
        at_once = tuple(replace(item, arrival=0.0) for item in shared.items)
        burst = replace(shared, name=f"{shared.name} (burst)", items=at_once)
        # What says most stands first: a CPU is busy with the arrivals, a large GPU only with the burst.
        first, then = (shared, burst) if self.on_cpu else (burst, shared)
        runs = self.replays(first, repeats) + self.replays(then, 1)
        # Nothing in common: what looking up, inserting and pinning cost, at least five times.
        count, prompt, output = (8, 128, 16) if self.on_cpu else (64, 512, 64)
        work = self.short(
            uniform(f"unshared-{count}x{prompt}+{output}", count, prompt, output)
        )
        runs += self.replays(work, max(5, repeats), count, {HASH: partial(self.after, "hash")})
        for name in ("agent-session", "chat-serving-short"):
            runs += self.replays(self.short(workload(f"{name}{self.small}")), 1)
        return runs + self.indexes()

    def replays(
        self,
        work: Workload,
        repeats: int,
        roofline_batch: int = 0,
        more: Mapping[str, Make] | None = None,
    ) -> list[Run]:
        """Measure phases 07 and 08, and the engines `more`, on `work` after a short warm-up.

        roofline_batch: requests of a batch for the roofline; 0: none, as where arrivals leave idle time.
        more: by variant, a function that makes its engine.
        """
        made: dict[str, Make] = {BEFORE: self.before, PHASE: partial(self.after, "radix")}
        for make in made.values():
            time_replay(make(), uniform("warm-up", 2, 64, 2), self.device)
        timed = {
            name: partial(self.sample, make, work)
            for name, make in {**made, **(more or {})}.items()
        }
        return self.compare(timed, work, roofline_batch, repeats=repeats, warm={})

    # Engines, with the same budget and the same cache, and samples.

    def before(self) -> PagedEngine:
        """Return an engine of phase 07."""
        return chunked_prefill.load(self.model, **self.sizes())

    def after(self, index: str) -> PagedEngine:
        """Return an engine of phase 08. index: the kind of its prefix index, "radix" or "hash"."""
        return prefix_cache.load(self.model, index=index, **self.sizes())

    def sizes(self) -> dict[str, Any]:
        """Return the engines' sizes, with cache for all requests: eviction is not what is measured here."""
        if self.on_cpu:
            return {"step_tokens": 256, "max_len": 1024, "cache_bytes": self.kv_bytes(8192)}
        return {"step_tokens": 2048, "max_len": 8192, "cache_bytes": self.kv_bytes(160_000)}

    def sample(self, make: Make, work: Workload, repeat: int) -> Sample:
        """Time a replay of `work` in a new engine; return its times, and the tokens computed and saved."""
        engine = make()
        found, _ = time_replay(engine, work.cold(repeat), self.device)
        found["computed_tokens"] = float(engine.stats.computed_tokens)
        if isinstance(engine.cache, PrefixCache):
            stats = engine.cache.stats
            found["cache_hit_fraction"] = stats.hit_rate
            found["tokens_saved"] = float(stats.hit_tokens)
            found["evicted_blocks"] = float(stats.evicted_blocks)
        return found

    def indexes(self) -> list[Run]:
        """Measure look-up, insertion and eviction, in microseconds, in prefix indexes of growing size.

        Nothing here touches a model or a device; it is Python that runs between two steps.
        """
        runs = []
        for blocks, hit in product(INDEX_BLOCKS[: 1 if self.quick else None], (0.0, 1.0)):
            work = index_queries(hit, blocks)
            timed = {
                PHASE if kind == "radix" else HASH: partial(index_sample, kind, blocks, work)
                for kind in INDEXES
            }
            runs += self.compare(timed, work, warm={}, index_blocks=blocks, known_share=hit)
        return runs


def stored_tokens(blocks: int) -> list[list[int]]:
    """Return token sequences that fill an index with about `blocks` blocks.

    Each has 64 blocks of 16 tokens; the first quarter is one of 16 common beginnings.
    """
    rng = random.Random(1)
    quarter = SEQUENCE // 4 * BLOCK
    starts = [[rng.randrange(10_000) for _ in range(quarter)] for _ in range(16)]
    count = max(1, blocks // (SEQUENCE - SEQUENCE // 4))
    return [
        starts[n % 16] + [rng.randrange(10_000) for _ in range(SEQUENCE * BLOCK - quarter)]
        for n in range(count)
    ]


def index_queries(hit: float, blocks: int) -> Workload:
    """Return a workload of 32 sequences of 64 blocks each, to be looked up in an index of `blocks` blocks.

    hit: share of each sequence's blocks, from its first on, that is in the index, from 0 to 1.
    """
    rng, stored = random.Random(2), stored_tokens(blocks)
    known = round(hit * SEQUENCE) * BLOCK
    items = []
    for query in range(32):
        rest = [10_000 + rng.randrange(10_000) for _ in range(SEQUENCE * BLOCK - known)]
        items.append(Item(tuple(stored[query * 7919 % len(stored)][:known] + rest), 1))
    return Workload("prefix-index", tuple(items), vocab=20_000)


def index_sample(kind: str, blocks: int, work: Workload, repeat: int) -> Sample:
    """Build an index, then time look-up and insertion of `work`'s sequences, and eviction of 64 blocks.

    kind: "radix" or "hash". blocks: blocks in the index. repeat: not read. Returns medians of single calls
    in microseconds, the look-up also in seconds, and the mean time of making a sequence's keys.
    """
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


run = Bench.run
draw = figure(
    Panel(
        "Where beginnings are shared, first tokens come sooner",
        FIRST,
        {"workload": "!unshared*"},
        label="{workload}, {variant:.2}",
    ),
    Panel(
        "A look-up of known blocks: in the tree {gain} as fast",
        "lookup_us",
        {"known_share": "1.0"},
        x="index_blocks",
        log="xy",
    ),
)
