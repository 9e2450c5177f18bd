"""Phase 06 against phase 05, end to end, and what each kind of kernel contributes.

The kernels by themselves are measured by `benchmarks/kernels/paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import paged_cache
import triton_paged_attention
from benchmarks.bench import Bench, evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import uniform
from common.errors import UserError
from forward.model import Model
from paged_cache import EngineBuilder, PagedEngine, Preset
from triton_paged_attention.feature import CUDA_BLOCK_SIZE, Kernels

PHASE, BEFORE = "06_triton_paged_attention", "05_paged_cache"
LAYERS_BY_TORCH = f"{PHASE}, layers by torch"
REQUESTS = 64
PROMPT = 512
OUTPUT = 64


def run(options: BenchOptions) -> Evidence:
    """One full batch through both phases, and through this one's attention beside phase 01's layers."""
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but phase 06 is measured on 'cuda' only"
        )
    runs = [run for target in targets(options) for run in measured(Bench(target))]
    return evidence_of(PHASE, runs, options)


def measured(bench: Bench) -> list[Run]:
    """Every variant on the same requests, in alternating order."""
    requests, output = (16, 16) if bench.quick else (REQUESTS, OUTPUT)
    work = uniform(f"batch-{requests}x{PROMPT}+{output}", requests, PROMPT, output)

    def once(variant: str, repeat: int) -> Sample:
        """Run a new engine each time: several caches beside each other would not fit."""
        engine = load(
            variant,
            bench.model,
            max_rows=requests,
            max_len=PROMPT + output,
            step_tokens=8192,
            cache_bytes=bench.kv_bytes(2 * requests * (PROMPT + output)),
        )
        return time_generation(engine, work.cold(repeat), bench.device)

    timed = {name: partial(once, name) for name in (BEFORE, PHASE, LAYERS_BY_TORCH)}
    return bench.compare(timed, work, requests, requests=requests)


def load(variant: str, model: Model, **options: Any) -> PagedEngine:
    """The engine of a variant."""
    if variant == LAYERS_BY_TORCH:
        return Preset(on=[AttentionOnly]).load(model, **options)
    return (paged_cache if variant == BEFORE else triton_paged_attention).load(
        model, **options
    )


@dataclass(frozen=True)
class AttentionOnly(Kernels):
    """Attention by kernels, and phase 01's layers as they are."""

    def install(self, builder: EngineBuilder) -> None:
        """Replace attention alone."""
        from triton_paged_attention.attention import TritonPagedAttention

        heads = builder.model.config.num_heads
        builder.attention.replace(self, partial(TritonPagedAttention, num_heads=heads))
        builder.default_block_size = CUDA_BLOCK_SIZE


draw = figure(Panel("{model}, {workload}: {gain} the tokens"), each=("model",))
