"""Engines with weights, keys and values of fewer bits on a GPU.

Each engine fills a good part of the GPU's memory, so they follow one after the other, not in turns.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import quant
from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.measure import Sample, Samples, alternate, summarize, time_generation
from benchmarks.plotting import COLOURS, GREY, bars, panels, save
from benchmarks.roofline import ceilings
from benchmarks.workloads import Item, Workload, workload
from common.errors import UserError
from paged_cache import PagedEngine

NAME = "quantized"
FP8: Mapping[str, Any] = {"quantization": "fp8"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "10_quant, fp8": FP8,
    "10_quant, fp8 and fp8 keys": {**FP8, "kv_cache": "fp8"},
    "10_quant, int4": {"quantization": "int4"},
}
"""Phase 09's own evidence has the same workloads in half precision."""
MODELS = ("random:qwen3-0.6b", "random:qwen3-8b")
WORKLOADS = ("single-512", "offline-256", "prefill-64x1024")
ONLY: Mapping[str, Sequence[str]] = {
    "10_quant, fp8 and fp8 keys": ("offline-256",),
    "10_quant, int4": ("single-512",),
}
"""Where a variant is measured, if not everywhere."""
CACHE_TOKENS = 300_000
PEERS: Sequence[tuple[str, str, str, float]] = (
    ("qwen3-8b", "fp8", "offline-256", 11_257),
    ("qwen3-8b", "fp8", "single-512", 269),
    ("qwen3-8b", "fp8", "prefill-64x1024", 68_400),
    ("qwen3-8b", "fp8 and fp8 keys", "offline-256", 11_485),
    ("qwen3-8b", "int4", "single-512", 223),
    ("qwen3-0.6b", "fp8", "offline-256", 22_911),
    ("qwen3-0.6b", "fp8", "single-512", 719),
    ("qwen3-0.6b", "fp8", "prefill-64x1024", 521_000),
)
"""vLLM 0.24.0 on one NVIDIA H200 with random weights, measured once, on 2026-11-21."""


def run(options: BenchOptions) -> Evidence:
    """Every variant of every model on the published workloads."""
    if options.device.type != "cuda":
        raise UserError(f"device is {options.device.type!r}, but {NAME} is measured on 'cuda' only")
    runs: list[Run] = []
    for model in [options.model] if options.model else MODELS:
        for variant in VARIANTS:
            runs += measure(replace(options, model=model), variant)
            gc.collect()
            torch.cuda.empty_cache()
        runs += peers(replace(options, model=model))
    return collect(NAME, runs, options.device, ceilings(options.device, options.dtype).to_json())


def measure(options: BenchOptions, variant: str) -> list[Run]:
    """One engine on its workloads."""
    assert options.model is not None
    engine = quant.load(
        options.model,
        device=str(options.device),
        dtype=str(options.dtype).removeprefix("torch."),
        max_rows=256,
        max_len=4096,
        step_tokens=16_384,
        cache_bytes=CACHE_TOKENS * _token_bytes(options, variant),
        **VARIANTS[variant],
    )
    facts = {"weight_bytes": float(engine.runner.model.weight_bytes)}
    runs = [single(options, variant, workload("single-512"), facts)]
    for name in ONLY.get(variant, WORKLOADS):
        work = workload(name)
        if options.quick:
            items = tuple(Item(item.prompt, min(item.max_tokens, 8)) for item in work.items[:8])
            work = replace(work, name=f"{name}[:8]", items=items)
        shift = count(1)  # the engine's prefix cache lives on: no run may have tokens that one before had
        kept = alternate({variant: partial(sample, engine, work, options, shift)}, options.repeats, log=print)
        given = dict(VARIANTS[variant])
        runs.append(
            summarize(variant, work, kept[variant], model=options.model, dtype=options.dtype, options=given)
        )
    return runs


def sample(
    engine: PagedEngine, work: Workload, options: BenchOptions, shift: Iterator[int], repeat: int
) -> Sample:
    """One run of a workload, with tokens that no run before had."""
    return time_generation(engine, work.cold(next(shift)), options.device)


def _token_bytes(options: BenchOptions, variant: str) -> int:
    from forward.shapes import SHAPES

    config = SHAPES[(options.model or "").removeprefix("random:")]
    size = torch.float8_e4m3fn if "kv_cache" in VARIANTS[variant] else options.dtype
    return config.kv_bytes_per_token(size)


def single(options: BenchOptions, variant: str, work: Workload, sample: Sample) -> Run:
    """Evidence of numbers that are not repeated."""
    found = summarize(variant, work, Samples(kept=[sample]), model=options.model or "", dtype=options.dtype)
    return replace(found, metrics={name: Metric((value,)) for name, value in sample.items()}, noise=None)


def peers(options: BenchOptions) -> list[Run]:
    """What another engine does in the same formats, see `PEERS`."""
    runs = []
    for model, variant, name, value in PEERS:
        if options.model == f"random:{model}":
            metric = "prompt_tokens_per_s" if name.startswith("prefill") else "output_tokens_per_s"
            runs.append(single(options, f"vLLM 0.24.0, {variant}", workload(name), {metric: value}))
    return runs


def draw(evidence: Evidence, out: Path) -> None:
    """The workloads of every model: each format, and another engine's."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    shown = [
        (model, name) for model in models for name in WORKLOADS if evidence.find(model=model, workload=name)
    ]
    figure, panel = panels(len(shown), rows=len(models))
    for axes, (model, name) in zip(panel, shown, strict=True):
        metric = "prompt_tokens_per_s" if name.startswith("prefill") else "output_tokens_per_s"
        found = [run for run in evidence.find(model=model, workload=name) if metric in run.metrics]
        ordered = sorted(found, key=lambda run: run.median(metric))
        bars(ordered, metric, axes=axes, gain=False, colour=colour, label=label)
        axes.set_title(f"{model}: {name}")
    save(figure, out, evidence)


def label(run: Run) -> str:
    """A variant's name, short."""
    return run.variant.replace("10_quant, ", "10, ")


def colour(run: Run) -> str:
    """Ours in one colour, others in grey."""
    return GREY if run.variant.startswith("vLLM") else COLOURS[0]
