"""Phase 05 against phase 04: more requests in the same bytes, and what gathering blocks costs for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

import numpy as np

import benchmarks.bench
import continuous
import paged_cache
from benchmarks.evidence import Run
from benchmarks.measure import ENOUGH_SECONDS, Sample, Samples, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import Workload, workload
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from paged_cache import BlockPool, PagedCache

PHASE, BEFORE = "05_paged_cache", "04_continuous"
FIXED = "05_paged_cache, pool for the largest batch"
BLOCK = 16
CAPACITY: dict[str, tuple[int, tuple[int, ...]]] = {
    "cpu": (1024, (512, 256, 128)),
    "cuda": (16_384, (4096, 2048, 1280)),
}
"""Tokens of cache, and the longest request that the server accepts: generous ones first."""
SAME_ROWS = {
    "cpu": ("offline-256-small", "chat-serving-long-small"),
    "cuda": ("paged_attention",),
}
MEMORY_BATCHES = (1, 4, 8, 16, 24, 32, 64, 128, 256)
MEMORY_MAX_LEN = 4096


class Bench(benchmarks.bench.Bench):
    """Measurements of phase 05 beside phase 04, over one model."""

    phase = PHASE

    def measured(self) -> list[Run]:
        """Measure requests in flight, the price of gathering blocks for attention, and cache memory."""
        return self.capacity() + self.same_rows() + self.memory()

    # The same bytes.

    def capacity(self) -> list[Run]:
        """Measure a burst of requests in both phases with the same bytes of cache, for several `max_len`.

        Phase 04 divides the bytes by `max_len`, the longest request that is accepted; phase 05 does not.
        """
        work = self.short(workload(f"paged_attention{self.small}"))
        tokens, accepted = CAPACITY["cpu" if self.on_cpu else "cuda"]
        size = self.kv_bytes(tokens)
        runs = []
        for max_len in accepted[: 1 if self.quick else None]:
            sizes = {"cache_bytes": size, "max_len": max_len, "max_rows": 64}
            enough = inf if max_len == accepted[0] else ENOUGH_SECONDS
            found = self.sample(self.engines(sizes, sizes), work, enough)
            for variant, kept in found.items():
                for sample in kept.kept:
                    sample["kv_cache_bytes"] = float(size)
                batch = round(max(sample["requests_in_flight"] for sample in kept.kept))
                facts: dict[str, Any] = {"max_len": max_len, "kv_bytes": size, "same": "bytes"}
                runs.append(self.run_of(variant, work, kept, batch, **facts))
        return runs

    def engines(
        self, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, Engine]:
        """Return an engine of phase 04 with the options `before`, and one of 05 with `after`, by variant."""
        return {
            BEFORE: continuous.load(self.model, **before),
            PHASE: paged_cache.load(self.model, block_size=BLOCK, **after),
        }

    def same_rows(self) -> list[Run]:
        """Measure both phases with the same rows, and room for all requests.

        What differs is the price of gathering blocks for attention.
        """
        runs = []
        for name in SAME_ROWS["cpu" if self.on_cpu else "cuda"]:
            work = self.short(workload(name))
            if not self.on_cpu:
                work = work.first(32)
            rows = len(work.items)
            max_len = max(len(item.prompt) + item.max_tokens for item in work.items)
            size = self.kv_bytes(rows * -(-max_len // BLOCK) * BLOCK)
            sizes = {"max_rows": rows, "max_len": max_len}
            engines = self.engines(sizes, {**sizes, "cache_bytes": size})
            for variant, kept in self.sample(engines, work, ENOUGH_SECONDS).items():
                runs.append(self.run_of(variant, work, kept, rows, rows=rows, same="rows"))
        return runs

    def sample(
        self, engines: Mapping[str, Engine], work: Workload, enough: float
    ) -> dict[str, Samples]:
        """Warm up the engines, measure them on `work` in turn, and return their samples by variant.

        A sample has the engine's counts, too: steps, computed tokens, preemptions, requests in flight.

        enough: seconds of a variant's samples after which it gets no further one.
        """
        self.warm_up(engines)

        def counts(engine: Engine) -> Sample:
            stats = engine.stats
            return {
                "steps": float(stats.steps),
                "computed_tokens": float(stats.computed_tokens),
                "preemptions": float(engine.scheduler.preemptions),
            }

        def sample(engine: Engine, repeat: int) -> Sample:
            before = counts(engine)
            engine.stats.most_running = 0
            timed = time_generation(engine, work.cold(repeat), self.device)
            counted = {name: value - before[name] for name, value in counts(engine).items()}
            return timed | counted | {"requests_in_flight": float(engine.stats.most_running)}

        timed = {variant: partial(sample, engine) for variant, engine in engines.items()}
        return alternate(timed, self.options.repeats, warm={}, enough=enough)

    # Memory.

    def memory(self) -> list[Run]:
        """Compute the bytes of cache that running requests hold in each phase; nothing is timed.

        Each request has its prompt and a random share of its output. The variant `FIXED` is a pool of blocks
        made once for the largest batch, of the same size for all smaller ones.
        """
        work, most = workload("offline-256"), MEMORY_BATCHES[-1]
        life = np.random.default_rng(0).random(most) * work.output_lens[:most]
        lengths = [
            prompt + int(at) for prompt, at in zip(work.prompt_lens, life, strict=False)
        ]
        facts: dict[str, Any] = {"max_len": MEMORY_MAX_LEN, "same": "requests"}
        runs = []
        for count in MEMORY_BATCHES:
            sizes = {
                BEFORE: self.kv_bytes(count * MEMORY_MAX_LEN),
                PHASE: self.paged_bytes(lengths[:count]),
                FIXED: self.paged_bytes(lengths),
            }
            for variant, size in sizes.items():
                kept = Samples([{"kv_cache_bytes": float(size)}])
                part = work.first(count)
                runs.append(self.run_of(variant, part, kept, requests=count, **facts))
        return runs

    def paged_bytes(self, lengths: list[int]) -> int:
        """Return the bytes of the blocks that a `PagedCache` gives to requests of these lengths in tokens."""
        cache = PagedCache(
            len(lengths), MEMORY_MAX_LEN, len(lengths) * MEMORY_MAX_LEN // BLOCK, BLOCK
        )
        for row, length in enumerate(lengths):
            request = Request(row, [0] * length, length, length + 1, SamplingParams(), row=row)
            assert cache.reserve(request, length)
        used = cache.allocator.count - cache.free
        return used * BlockPool.bytes_per_block(self.config, BLOCK, self.dtype)


run = Bench.run
draw = figure(
    Panel(
        "In the same bytes {gain} the requests",
        "requests_in_flight",
        {"same": "bytes"},
        x="max_len",
        log="x",
    ),
    Panel(
        "Blocks: {gain} fewer bytes for the same requests",
        "kv_cache_bytes",
        {"same": "requests"},
        x="requests",
        log="xy",
    ),
)
