"""Phase 09 on a CPU: a step in one call (the appendix's `cpu_step`) against the same operators from Python.

SmolLM2 in bfloat16 and with weights of eight and of four bits (the head's as well): one request,
several, and one beside a busy program. `ladder bench 09` is this where the device is a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Sample, alternate, neighbours, time_generation
from benchmarks.workloads import Workload, uniform, workload
from paged_cache import PagedEngine

PHASE, BEFORE = "09_cuda_graphs", "08_prefix_cache"
MODEL = "smollm2"
FORMATS: dict[str, dict[str, str]] = {
    PHASE: {},
    "10_quant int8": {"quantization": "int8"},
    "10_quant int4": {"quantization": "int4", "head": "int4"},
}
MAX_LEN, ROWS = 1024, 16
TOGETHER, BESIDE = 4, 1
"""Requests at once, and programs beside one request."""
METRIC = "output_tokens_per_s"


def measured(options: BenchOptions) -> Evidence:
    """One model in each format, in bfloat16: PyTorch's products of few bits want it."""
    target = replace(options, model=options.model or MODEL, dtype=torch.bfloat16)
    return evidence_of(PHASE, measure(Bench(target)), options)


def measure(bench: Bench) -> list[Run]:
    """One request, several, and one beside a busy program."""
    sizes: dict[str, Any] = {"max_rows": ROWS, "max_len": MAX_LEN, "cache_bytes": 1 << 28}
    engines = {BEFORE: engine_of("08", bench.model, **sizes)}
    for name, kind in FORMATS.items():
        for variant in (name, name + APPENDIX):
            engines[variant] = engine_of(variant, bench.model, **kind, **sizes)
    single = workload("single-512-small")
    together = uniform(f"decode-{TOGETHER}x32", TOGETHER, 32, 64)
    if bench.quick:
        single, together = (work.first(4, tokens=8) for work in (single, together))
    runs = compare(bench, engines, single) + compare(bench, engines, together)
    with neighbours(BESIDE):
        return runs + compare(bench, engines, single, BESIDE)


def compare(
    bench: Bench, engines: dict[str, PagedEngine], work: Workload, busy: int = 0
) -> list[Run]:
    """All engines on one workload in alternating order, beside so many busy programs."""
    shift = iter(range(1, 1000))  # other tokens at every turn: all have prefix caches

    def timed(engine: PagedEngine) -> Callable[[int], Sample]:
        return lambda repeat: time_generation(engine, work.cold(next(shift)), bench.device)

    variants = {name: timed(engine) for name, engine in engines.items()}
    kept = alternate(variants, bench.options.repeats, beside=busy > 0)
    facts: dict[str, Any] = {"neighbours": busy} if busy else {}
    # A roofline is that of the model's dtype, on an idle machine.
    batches = {name: 0 if busy or "int" in name else len(work.items) for name in kept}
    return [
        bench.run_of(name, work, samples, batches[name], **facts)
        for name, samples in kept.items()
    ]
