"""Phase 17 against phase 08: requests in flight in the same memory, and the speed of their decodes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import (
    Sample,
    Samples,
    alternate_engines,
)
from benchmarks.plotting import GREY, bars, colours, lines, number, panels, save
from benchmarks.plotting import beside as name_value
from benchmarks.recorded_peers import beside
from benchmarks.roofline import ceilings, summarize_generation
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
    """Count requests in flight by the books of each cache, then time decodes of equal batches.

    On a GPU the published workloads follow, for a model most of whose layers have a state.
    """
    runs: list[Run] = []
    if options.model != STATES:
        bench = Bench(options if options.model is not None else replace(options, model=MODEL))
        runs = bench.counted() + bench.decodes()
        del bench
    if options.device.type == "cuda":
        runs += published(replace(options, model=STATES))
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """One model in the caches of both phases."""

    # Counted.

    def counted(self) -> list[Run]:
        """More requests than full caches hold, all of one length, into the same bytes: nothing is computed.

        The schedulers and caches are those of the engines, and decide as with a model behind them.
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
        """The same batch for each engine, with room for all of it: what groups cost a step."""
        shapes: tuple[tuple[int, int, int], ...] = ((2, 1024, 48),)
        if not self.on_cpu:
            shapes = ((1, 8192, 256), (32, 8192, 128))
        if self.quick:
            shapes = ((2, 64, 8),)
        runs = []
        for count, context, output in shapes:
            work = uniform(f"decode-{count}x{context}+{output}", count, context, output)
            names = (BEFORE, PHASE) if self.on_cpu else (BEFORE, SERVED, PHASE)
            # On a CPU only groups shall differ; on a GPU phase 13 has graphs and overlap as well.
            alike: dict[str, Any] = {"overlap": False} if self.on_cpu else {}
            sizes = {
                "max_rows": max(2, count),
                "max_len": context + output + 16,
                "cache_bytes": self.kv_bytes((count + 2) * (context + output + 64)),
            }
            engines = {BEFORE: engine_of(BEFORE, self.model, **sizes)}
            for name in names[1:]:
                engines[name] = engine_of(name, self.model, **sizes, drafter="none", **alike)
            self.warm_up(engines)
            timed = {name: self.timer(engine, work) for name, engine in engines.items()}
            runs += self.compare(timed, work, count, warm={}, requests=count)
            del engines
        return runs


def published(options: BenchOptions) -> list[Run]:
    """One request, 256 and 64 long prompts through layers with states."""
    sizes: dict[str, Any] = {
        "max_rows": 256,
        "max_len": 4096,
        "step_tokens": 16_384,
        "drafter": "none",
    }
    name, top = options.model or "", ceilings(options.device, options.dtype)
    runs = []
    for variant in (PHASE, PHASE + APPENDIX):
        engine = engine_of(
            variant, name, device=str(options.device), dtype="bfloat16", **sizes
        )
        for load in ("single-512", "offline-256", "prefill-64x1024"):
            work = workload(load)
            if options.quick:
                work = work.first(8, tokens=8)
            made = {variant: engine}
            kept = alternate_engines(
                made, work, device=options.device, repeats=options.repeats
            )
            found = summarize_generation(
                variant,
                work,
                kept[variant],
                model=name,
                config=engine.runner.model.config,
                dtype=options.dtype,
                top=top,
                batch=len(work.items),
            )
            runs.append(found)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return runs


def plain(context: int, blocks: int) -> PrefixCache:
    """Phase 08's cache of so many blocks."""
    return PrefixCache(ROWS, context, blocks, BLOCK, RadixIndex())


def hybrid(config: ModelConfig, context: int, blocks: int) -> HybridCache:
    """The hybrid cache of a model in the memory of so many blocks of all layers."""
    layout = LayerGroups.of(config)
    own = layout.blocks(blocks)
    return HybridCache(
        ROWS, context, own, BLOCK, RadixIndex(), layout, step_tokens=STEP_TOKENS
    )


def serve(cache: PagedCache, context: int) -> Sample:
    """Let requests of one length run through a cache by its scheduler; returns what ran at once.

    Prompts have nothing in common. A step has tokens for a chunk of every request, so that memory alone is
    the limit. A request counts as in flight while it decodes.
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
    """Schedule a step, and land it with any token."""
    for work in scheduler.schedule():
        for request in work.sampled_requests:
            request.tokens.append(0)
        scheduler.finish_step(work)
        for request in work.sampled_requests:
            if len(request.tokens) == request.limit:
                request.finish_reason = "length"
                scheduler.leave(request)


def draw(evidence: Evidence, out: Path) -> None:
    """Requests in flight over the context, and tokens a second of equal batches; or of layers with states."""
    runs = evidence.find(same="bytes")
    if not runs:
        _beside_peer(evidence, out)
        return
    figure, (flight, speed) = panels(2)
    lines(runs, x="context", metric="requests_in_flight", axes=flight, log_x=True, log_y=True)
    longest = max(run.options["context"] for run in runs)
    new, old = (evidence.one(name, same="bytes", context=longest) for name in (PHASE, BEFORE))
    factor = new.median("requests_in_flight") / old.median("requests_in_flight")
    flight.set_title(
        f"At {longest:,} tokens {factor:.1f} times the requests in the same bytes"
    )
    flight.set_xlabel("tokens of a request")
    timed = [run for run in evidence.runs if run.workload.startswith("decode-")]
    bars(
        timed,
        "output_tokens_per_s",
        axes=speed,
        label=lambda run: f"{run.variant}\n{run.workload}",
    )
    speed.set_title("Output tokens a second of equal batches, prompts included")
    save(figure, out, evidence)


def _beside_peer(evidence: Evidence, out: Path) -> None:
    """Draw each workload's tokens a second as a factor of the best other engine's; without one it is 1."""
    figure, (axes,) = panels(1, height=2.6)
    factors = dict[str, float]()
    texts = []
    for run in evidence.runs:
        prefill = run.workload.startswith("prefill")
        metric = "prompt_tokens_per_s" if prefill else "output_tokens_per_s"
        others = [
            each
            for each in beside(evidence, model=run.model, workload=run.workload)
            if metric in each.metrics
        ]
        best = max(others, key=lambda each: each.median(metric), default=run)
        factors[run.workload] = run.median(metric) / best.median(metric)
        texts.append(
            f"{factors[run.workload]:.2f}×: {number(run.median(metric))} to {number(best.median(metric))} "
            f"{'prompt' if prefill else 'output'} tokens/s ({best.variant})"
        )
    axes.barh(list(factors), list(factors.values()), height=0.6, color=colours([PHASE])[PHASE])
    axes.axvline(1.0, color=GREY, linewidth=1.4)
    for row, (factor, text) in enumerate(zip(factors.values(), texts, strict=True)):
        name_value(axes, text, factor, row, 5)
    axes.invert_yaxis()
    axes.set_xlim(0, 2.4 * max(factors.values()))
    axes.set_xlabel("times the tokens a second of the other engine")
    axes.grid(visible=False, axis="y")
    low, high = min(factors.values()), max(factors.values())
    axes.set_title(
        f"{evidence.runs[0].model}: {low:.2f} to {high:.2f} times the other engine's tokens"
    )
    save(figure, out, evidence)
