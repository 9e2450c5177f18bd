"""Phase 05 against phase 04: more requests in the same bytes, and what gathering blocks costs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import benchmarks.bench
import continuous
import paged_cache
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, alternate, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import Workload, uniform, workload
from common.models.config import ModelConfig
from common.request import Request
from common.roofline import time_call
from common.sampling.params import SamplingParams
from continuous.attention import RowAttention
from continuous.batch import Batch, HostBatch
from continuous.cache import RowStore
from continuous.engine import Engine
from continuous.rows import RequestRows
from continuous.runner import BatchAttention
from continuous.work import Work
from paged_cache import BlockPool, PagedBatch, PagedCache, TorchPagedAttention

PHASE, BEFORE = "05_paged_cache", "04_continuous"
FIXED = "05_paged_cache, pool for the largest batch"
BLOCK = 16
CAPACITY: dict[str, tuple[int, tuple[int, ...]]] = {
    "cpu": (1024, (512, 256, 128)),
    "cuda": (16_384, (4096, 2048, 1280)),
}
"""Tokens of cache, and the longest request that the server accepts: generous ones first."""
CONTEXTS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
BATCHES = {"cpu": (1, 4, 16), "cuda": (1, 16, 64)}
LAYERS = 4
"""Layers of cache in the attention benchmark: enough that a layer's keys leave the processor's cache before
their next turn."""
MEMORY_BATCHES = (1, 4, 8, 16, 24, 32, 64, 128, 256)
MEMORY_MAX_LEN = 4096


def run(options: BenchOptions) -> Evidence:
    """Requests in flight, the price of gathering (alone and end to end), and memory."""
    runs = []
    for target in targets(options):
        bench = Bench(target)
        runs += bench.capacity() + bench.same_rows() + bench.attention() + bench.memory()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """Both phases over one model."""

    @property
    def kind(self) -> str:
        """Of the machine: whose sizes are measured."""
        return "cpu" if self.on_cpu else "cuda"

    # The same bytes.

    def capacity(self) -> list[Run]:
        """A burst of requests into the same bytes of cache, for servers that accept shorter and longer ones.

        04 divides the bytes by the longest request that the server accepts. 05 does not care.
        """
        work = workload(f"paged_attention{self.small}")
        tokens, accepted = CAPACITY[self.kind]
        if self.quick:
            work = work.first(6)
            tokens = 512
            accepted = (256,)
        size = self.kv_bytes(tokens)
        runs = []
        for max_len in accepted:
            sizes = {"cache_bytes": size, "max_len": max_len, "max_rows": 64}
            for variant, kept in self.sample(self.engines(sizes, sizes), work).items():
                for sample in kept.kept:
                    sample["kv_cache_bytes"] = float(size)
                batch = round(max(sample["requests_in_flight"] for sample in kept.kept))
                facts: dict[str, Any] = {"max_len": max_len, "kv_bytes": size, "same": "bytes"}
                runs.append(self.run_of(variant, work, kept, batch, **facts))
        return runs

    def engines(
        self, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, Engine]:
        """Both phases' engines of these sizes."""
        return {
            BEFORE: continuous.load(self.model, **before),
            PHASE: paged_cache.load(self.model, block_size=BLOCK, **after),
        }

    # The price of gathering.

    def same_rows(self) -> list[Run]:
        """The same rows for both, and room for all requests: what is left is the price of gathering."""
        names = ["offline-256-small", "chat-serving-long-small"]
        if not self.on_cpu:
            names = ["paged_attention"]
        runs = []
        for name in names[: 1 if self.quick else None]:
            work = workload(name)
            if self.quick:
                work = work.first(3)
            elif not self.on_cpu:
                work = work.first(32)
            rows = len(work.items)
            max_len = max(len(item.prompt) + item.max_tokens for item in work.items)
            whole = -(-max_len // BLOCK) * BLOCK
            size = rows * whole * self.config.kv_bytes_per_token(self.dtype)
            sizes = {"max_rows": rows, "max_len": max_len}
            engines = self.engines(sizes, {**sizes, "cache_bytes": size})
            for variant, kept in self.sample(engines, work).items():
                runs.append(self.run_of(variant, work, kept, rows, rows=rows, same="rows"))
        return runs

    def attention(self) -> list[Run]:
        """One layer's attention of a decode step, over context and batch, with its writes to the cache."""
        few = 2 if self.quick else None
        contexts, batches = CONTEXTS[self.kind][:few], BATCHES[self.kind][:few]
        return [run for c in contexts for b in batches for run in self.attention_at(b, c)]

    def attention_at(self, batch: int, context: int) -> list[Run]:
        """`batch` decodes with `context` keys each."""
        work = uniform("paged-decode-attention", batch, context, 1)
        layers = self.model.layer_specs[:LAYERS]
        kv_heads, size = layers[0].num_kv_heads, layers[0].head_dim
        rng = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(batch, count, size, generator=rng).to(self.device, self.dtype)
            for count in (layers[0].num_heads, kv_heads, kv_heads)
        )

        def measure(attention: BatchAttention, repeat: int) -> Sample:
            floor = 0.05 if self.quick else 0.3
            with torch.inference_mode():
                times = time_call(
                    lambda: [attention(layer, q, k, v) for layer in layers],
                    self.device,
                    repeats=10,
                    floor=floor,
                )
            seconds = float(np.median(times)) / len(layers)
            read = 2 * batch * context * kv_heads * size * self.dtype.itemsize
            reached = read / seconds / self.top.read_bytes_per_s
            return {
                "seconds": seconds,
                "attention_us": seconds * 1e6,
                "bandwidth_fraction": reached,
            }

        timed = {
            name: partial(measure, attention)
            for name, attention in self.contenders(batch, context)
        }
        return self.compare(timed, work, batch=batch, context=context)

    def contenders(self, batch: int, context: int) -> Iterator[tuple[str, BatchAttention]]:
        """04's attention over rows and 05's over scattered blocks, in the middle of the same decode step."""
        rows = RequestRows(batch, context + 1, self.device)
        requests = [
            Request(n, [0] * context, context, context + 1, SamplingParams())
            for n in range(batch)
        ]
        for request in requests:
            rows.acquire(request)
        works = [Work(r, r.row, context - 1, 1, (), (r,)) for r in requests]
        host = HostBatch.of(works, rows.prompt_lens)
        plain = Batch.of(host, rows)
        few: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        config = shortened(self.config)
        store = RowStore(config, batch, context, **few)
        store.data.normal_()
        by_rows = RowAttention(store)
        by_rows.begin(plain)
        yield BEFORE, by_rows
        per_request = -(-context // BLOCK)
        pool = BlockPool(config, batch * per_request, BLOCK, **few)
        pool.data.normal_()
        # As after hours of service: a request's blocks are anywhere.
        order = torch.randperm(batch * per_request, generator=torch.Generator().manual_seed(0))
        tables = order.view(batch, per_request)
        slots = tables[:, (context - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
        paged = TorchPagedAttention(pool)
        paged.begin(
            PagedBatch(
                **vars(plain),
                block_tables=tables.int().to(self.device),
                slots=slots.to(self.device),
            )
        )
        yield PHASE, paged

    # Memory.

    def memory(self) -> list[Run]:
        """Bytes of cache that running requests hold, by the managers' own books: nothing is timed.

        The requests are caught at a random moment of their lives. The third line is a pool that was made once
        for the largest batch, as long as it runs nothing smaller.
        """
        life = self.half_way(MEMORY_BATCHES[-1])
        held = {count: self.paged_bytes(life[:count]) for count in MEMORY_BATCHES}
        runs = []
        for count in MEMORY_BATCHES:
            token = self.config.kv_bytes_per_token(self.dtype)
            sizes = {
                BEFORE: count * MEMORY_MAX_LEN * token,
                PHASE: held[count],
                FIXED: held[MEMORY_BATCHES[-1]],
            }
            facts: dict[str, Any] = {
                "requests": count,
                "max_len": MEMORY_MAX_LEN,
                "same": "requests",
            }
            for variant, size in sizes.items():
                kept = Samples([{"kv_cache_bytes": float(size)}])
                part = workload("offline-256").first(count)
                runs.append(self.run_of(variant, part, kept, **facts))
        return runs

    def half_way(self, count: int) -> list[int]:
        """Tokens that each of the first requests of `offline-256` has at a random moment."""
        share = np.random.default_rng(0).random(count)
        items = workload("offline-256").items[:count]
        return [
            len(i.prompt) + int(s * i.max_tokens) for i, s in zip(items, share, strict=True)
        ]

    def paged_bytes(self, lengths: list[int]) -> int:
        """Bytes of the blocks that a cache manager gives to requests of these lengths."""
        cache = PagedCache(
            len(lengths), MEMORY_MAX_LEN, len(lengths) * MEMORY_MAX_LEN // BLOCK, BLOCK
        )
        for row, length in enumerate(lengths):
            request = Request(row, [0] * length, length, length + 1, SamplingParams(), row=row)
            assert cache.reserve(request, length)
        used = cache.allocator.count - cache.free
        return used * BlockPool.bytes_per_block(self.config, BLOCK, self.dtype)

    def sample(self, engines: Mapping[str, Engine], work: Workload) -> dict[str, Samples]:
        """Warm up, then measure in alternating order, with what the engines counted meanwhile."""
        self.warm_up(engines)

        def measure(engine: Engine) -> Callable[[int], Sample]:
            def sample(repeat: int) -> Sample:
                stats = engine.stats
                before = stats.steps, stats.computed_tokens, engine.scheduler.preemptions
                stats.most_running = 0
                timed = time_generation(engine, work.cold(repeat), self.device)
                after = stats.steps, stats.computed_tokens, engine.scheduler.preemptions
                names = ("steps", "computed_tokens", "preemptions")
                for name, old, new in zip(names, before, after, strict=True):
                    timed[name] = float(new - old)
                return {**timed, "requests_in_flight": float(stats.most_running)}

            return sample

        timed = {variant: measure(engine) for variant, engine in engines.items()}
        return alternate(timed, self.options.repeats, warm={})


def shortened(config: ModelConfig) -> ModelConfig:
    """The same model with few layers, for caches that are not larger than they need to be."""
    return replace(config, num_layers=LAYERS, sliding_windows=config.sliding_windows[:LAYERS])


draw = figure(
    Panel(
        "In the same bytes {gain} the requests",
        "requests_in_flight",
        {"same": "bytes"},
        x="max_len",
        log="x",
    ),
    Panel(
        "Gathering blocks: {gain} the time of a layer's attention",
        "attention_us",
        {"batch": ("16", "64")},
        x="context",
        log="xy",
    ),
    Panel(
        "Blocks: {gain} fewer bytes for the same requests",
        "kv_cache_bytes",
        {"same": "requests"},
        x="requests",
        log="xy",
    ),
)
