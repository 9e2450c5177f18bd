"""Phase 17 against phase 08: requests in flight in the same memory, and the speed of their decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, release_memory
from benchmarks.plotting import Panel, figure
from benchmarks.published import PUBLISHED, SIZES
from benchmarks.workloads import uniform, workload
from chunked_prefill import ChunkedScheduler
from common.models.config import ModelConfig
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.scheduler import Scheduler
from hybrid_cache import HybridCache, LayerGroups
from paged_cache import PagedCache
from prefix_cache import PrefixCache, RadixIndex

PHASE = "17_hybrid_cache"
BEFORE = "08_prefix_cache"
SERVED = "13_serving"
NO_DRAFTS = f"{PHASE}, no drafts{APPENDIX}"
MODEL, STATES = "gemma3-270m", "random:qwen3.5-0.8b"
"""Gemma's weights are small, and of its 18 layers 15 have a window of 512 tokens."""
CONTEXTS = (1024, 2048, 4096, 8192, 16_384)
BLOCK = 16
STEP_TOKENS = 256
OUTPUT = 256
ROWS = 384
FULL = 16
"""Requests of the longest context for which phase 08 has room in the counted runs."""


def run(options: BenchOptions) -> Evidence:
    """Count requests that fit equal memory in each phase's KV cache, then time decodes of equal batches.

    On a GPU the published workloads follow, for a model most of whose layers are Gated DeltaNet.

    Returns:
        The evidence of all runs.
    """
    runs: list[Run] = []
    if options.model != STATES:
        bench = Bench(options if options.model is not None else replace(options, model=MODEL))
        runs = bench.counted() + bench.decodes()
        del bench
        release_memory(options.device)
    if options.device.type == "cuda":
        bench = Bench(replace(options, model=STATES))
        sizes: dict[str, Any] = {**SIZES, "dtype": "bfloat16", "device": "cuda"}
        half = {**sizes, "cache_bytes": 40 << 30}
        # The served engine guesses tokens, too; in turn beside the same without.
        served = {
            PHASE + APPENDIX: engine_of(PHASE + APPENDIX, STATES, **half),
            NO_DRAFTS: engine_of(NO_DRAFTS, STATES, **half, drafter="none"),
        }
        runs += [run for name in PUBLISHED for run in bench.race(served, workload(name))]
        del served
        release_memory(options.device)
        own = partial(engine_of, PHASE, STATES, **sizes, drafter="none")
        runs += bench.one_by_one({PHASE: own}, PUBLISHED[:1])  # in torch others take minutes
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """One model in the KV caches of phases 08 and 17: requests in flight are counted, decodes are timed."""

    # Counted.

    def counted(self) -> list[Run]:
        """Count requests of one length that run at once in the same bytes of KV cache; no model computes.

        The schedulers and caches are those of the engines, and decide as with a model behind them.

        Returns:
            One run for each context length and cache.
        """
        blocks = FULL * CONTEXTS[-1] // BLOCK
        runs = []
        for context in CONTEXTS[: 2 if self.quick else None]:
            if context > self.config.max_position_embeddings:
                break
            work = uniform(f"in-flight-{context}", ROWS, context - OUTPUT, OUTPUT, vocab=8)
            caches: dict[str, Callable[[], PagedCache]] = {
                BEFORE: partial(plain, context, blocks),
                PHASE: partial(hybrid, self.config, context, blocks),
            }
            for variant, make in caches.items():
                samples = [serve(make(), context) for _ in range(self.options.repeats)]
                for sample in samples:
                    sample["kv_cache_bytes"] = float(self.kv_bytes(blocks * BLOCK))
                facts: dict[str, Any] = {"context": context, "same": "bytes"}
                runs.append(self.run_of(variant, work, Samples(samples), **facts))
        return runs

    # Timed.

    def decodes(self) -> list[Run]:
        """Time equal batches in each phase's engine, with enough memory: what KV cache groups cost a step.

        Returns:
            The runs of every batch and engine.
        """
        cpu = self.on_cpu
        runs = []
        for count, context, output in (
            ((2, 1024, 48),) if cpu else ((1, 8192, 256), (32, 8192, 128))
        ):
            work = uniform(f"decode-{count}x{context}+{output}", count, context, output)
            sizes = {
                "max_rows": max(2, count),
                "max_len": context + output + 16,
                "cache_bytes": self.kv_bytes((count + 2) * (context + output + 64)),
            }
            engines = {BEFORE: engine_of(BEFORE, self.model, **sizes)}
            # On a CPU only groups shall differ; on a GPU phase 13 has graphs and overlap as well.
            alike: dict[str, Any] = {"overlap": False} if cpu else {}
            for name in (PHASE,) if cpu else (SERVED, PHASE):
                engines[name] = engine_of(name, self.model, **sizes, drafter="none", **alike)
            runs += self.race(engines, work, requests=count)
            del engines
        return runs


def plain(context: int, blocks: int) -> PrefixCache:
    """Return phase 08's prefix cache of `blocks` blocks, for requests of `context` tokens."""
    return PrefixCache(ROWS, context, blocks, BLOCK, RadixIndex())


def hybrid(config: ModelConfig, context: int, blocks: int) -> HybridCache:
    """Return a model's hybrid cache in the memory that `blocks` blocks of all its layers take.

    context: most tokens of a request.
    """
    layout = LayerGroups.of(config)
    own = layout.blocks(blocks)
    return HybridCache(
        ROWS, context, own, BLOCK, RadixIndex(), layout, step_tokens=STEP_TOKENS
    )


def serve(cache: PagedCache, context: int) -> Sample:
    """Run requests of `context` tokens through a scheduler and a cache, with no model.

    The last 256 tokens of each are generated. Prompts have nothing in common. A step has tokens for a chunk
    of every request, so that memory alone is the limit. A request counts as in flight while it decodes.

    Returns:
        The most requests in flight in any step, and the number of preemptions.
    """
    rows = RequestRows(ROWS, 1)
    scheduler = ChunkedScheduler(
        rows, cache, step_tokens=STEP_TOKENS * ROWS, chunk_tokens=STEP_TOKENS
    )
    for row in range(ROWS):
        prompt = context - OUTPUT
        tokens = [row] * prompt
        request = Request(
            row, tokens, prompt, context, SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        )
        scheduler.add([request])
    most = steps = 0
    while not scheduler.idle and steps < ROWS:
        step(scheduler)
        steps += 1
        most = max(most, sum(not request.prefilling for request in scheduler.running))
    return {"requests_in_flight": float(most), "preemptions": float(scheduler.preemptions)}


def step(scheduler: Scheduler) -> None:
    """Schedule a step, and finish it with token 0 for every request that samples."""
    for work in scheduler.schedule():
        for request in work.sampled_requests:
            request.tokens.append(0)
        scheduler.finish_step(work)
        for request in work.sampled_requests:
            if len(request.tokens) == request.limit:
                request.finish_reason = "length"
                scheduler.leave(request)


draw = figure(
    Panel(
        "{gain} the requests in the same bytes",
        "requests_in_flight",
        {"same": "bytes"},
        x="context",
        log="xy",
    ),
    Panel(
        "Equal batches, prompts included",
        where={"workload": "decode-*"},
        label="{variant}\n{workload}",
    ),
    *(
        Panel("{model}, {workload}", where={"workload": work}, peers=True)
        for work in PUBLISHED
    ),
)
