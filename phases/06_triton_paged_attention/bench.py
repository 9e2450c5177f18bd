"""Phase 06 against phase 05, end to end, and what each kind of kernel contributes.

The kernels by themselves are measured by `benchmarks/kernels/paged_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

import paged_cache
import triton_paged_attention
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, alternate, time_generation
from benchmarks.plotting import ROOFLINE, bars, colours, panels, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
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
    runs = [run for target in targets(options) for run in measured(target)]
    return collect(
        PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


def measured(options: BenchOptions) -> list[Run]:
    """Every variant on the same requests, in alternating order."""
    model, name = load_target(options), options.model or ""
    requests, output = (16, 16) if options.quick else (REQUESTS, OUTPUT)
    work = uniform(f"batch-{requests}x{PROMPT}+{output}", requests, PROMPT, output)
    variants = (BEFORE, PHASE, LAYERS_BY_TORCH)

    def build(variant: str) -> PagedEngine:
        """A new engine each time: several caches beside each other would not fit."""
        tokens = 2 * requests * (PROMPT + output)
        return load(
            variant,
            model,
            max_rows=requests,
            max_len=PROMPT + output,
            step_tokens=8192,
            cache_bytes=tokens * model.config.kv_bytes_per_token(model.dtype),
        )

    def once(variant: str, repeat: int) -> Sample:
        return time_generation(build(variant), work.cold(repeat), options.device)

    samples = alternate(
        {variant: partial(once, variant) for variant in variants},
        repeats=options.repeats,
    )
    top = ceilings(options.device, options.dtype)
    return [
        summarize_generation(
            variant,
            work,
            kept,
            model=name,
            config=model.config,
            dtype=options.dtype,
            top=top,
            batch=requests,
            options={"requests": requests},
        )
        for variant, kept in samples.items()
    ]


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


def draw(evidence: Evidence, out: Path) -> None:
    """Both phases; and what is lost when torch computes one kind of operator."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    figure, panel = panels(2 * len(models), rows=len(models), height=2.8)
    for place, model in enumerate(models):
        both, losses = panel[2 * place : 2 * place + 2]
        found = evidence.find(model=model)
        old, new = (evidence.one(name, model=model) for name in (BEFORE, PHASE))
        metric = "output_tokens_per_s"
        bars([old, new], metric, axes=both, gain=False)
        gain = new.median(metric) / old.median(metric)
        both.set_title(f"{model}, {new.workload}: {gain:.1f} times the tokens")
        _losses(losses, new, [run for run in found if run not in (old, new)], metric)
    save(figure, out, evidence)


def _losses(axes: Axes, full: Run, less: Sequence[Run], metric: str) -> None:
    """The change against all kernels, a bar for each kind that is left to torch, the dearest first."""
    base = full.median(metric)
    ordered = sorted(less, key=lambda run: run.median(metric))
    for row, run in enumerate(ordered):
        change = run.median(metric) / base - 1
        samples = [sample / base - 1 for sample in run.metrics[metric].samples]
        axes.barh(row, change, height=0.62, color=colours([PHASE, run.variant])[run.variant])
        axes.plot(samples, [row] * len(samples), ".", color="#202020", markersize=3.5)
        axes.annotate(
            f"{change:+.0%}", (max(0.0, *samples), row), (5, 0), textcoords="offset points",
            va="center",
            fontsize=8,
        )  # fmt: skip
    names = [
        run.variant.removeprefix(f"{PHASE}, ").removesuffix(" by torch") for run in ordered
    ]
    axes.axvline(0, color=ROOFLINE, linewidth=1.0)
    axes.margins(x=0.2)
    axes.set_yticks(range(len(names)), [name.replace("_", ", ") for name in names])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("change of the rate against all kernels")
    axes.set_title("What is lost when torch computes it")
