"""Phase 06 against phase 05, end to end, and what each kind of kernel contributes.

The kernels by themselves are measured by `benchmarks/kernels/paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import benchmarks.bench
import paged_cache
import triton_paged_attention
from benchmarks.evidence import Run
from benchmarks.measure import Sample, time_generation
from benchmarks.plotting import Panel, figure
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


class Bench(benchmarks.bench.Bench):
    """Measurements of phase 06, phase 05, and 06 with layers by torch, over one model on a GPU."""

    phase = PHASE

    def measured(self) -> list[Run]:
        """Measure phases 05 and 06, and 06's attention with phase 01's layers, on 64 requests at once.

        Raises:
            UserError: there is no GPU.
        """
        if self.on_cpu:
            raise UserError("device is 'cpu', but phase 06 is measured on 'cuda' only")
        work = self.short(
            uniform(f"batch-{REQUESTS}x{PROMPT}+{OUTPUT}", REQUESTS, PROMPT, OUTPUT)
        )
        sizes = {
            "max_rows": REQUESTS,
            "max_len": PROMPT + OUTPUT,
            "step_tokens": 8192,
            "cache_bytes": self.kv_bytes(2 * REQUESTS * (PROMPT + OUTPUT)),
        }

        def once(variant: str, repeat: int) -> Sample:
            """Time `variant` in a new engine: several engines' caches would not fit beside each other."""
            engine = load(variant, self.model, **sizes)
            return time_generation(engine, work.cold(repeat), self.device)

        timed = {name: partial(once, name) for name in (BEFORE, PHASE, LAYERS_BY_TORCH)}
        return self.compare(timed, work, REQUESTS, requests=REQUESTS)


def load(variant: str, model: Model, **options: Any) -> PagedEngine:
    """Return the engine of a variant (a name such as `BEFORE`). options: those of `Preset.load`."""
    if variant == LAYERS_BY_TORCH:
        return Preset(on=[AttentionOnly]).load(model, **options)
    return (paged_cache if variant == BEFORE else triton_paged_attention).load(
        model, **options
    )


@dataclass(frozen=True)
class AttentionOnly(Kernels):
    """Attention by kernels, and phase 01's layers as they are."""

    def install(self, builder: EngineBuilder) -> None:
        """Replace attention by kernels, and no layer of the model."""
        from triton_paged_attention.attention import TritonPagedAttention

        heads = builder.model.config.num_heads
        builder.attention.replace(self, partial(TritonPagedAttention, num_heads=heads))
        builder.default_block_size = CUDA_BLOCK_SIZE


run = Bench.run
draw = figure(Panel("{model}, {workload}: {gain} the tokens"), each=("model",))
