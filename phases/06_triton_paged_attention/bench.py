"""Phase 06 against phase 05, end to end, and what each kind of kernel contributes.

The kernels by themselves are measured by `benchmarks/kernels/paged_attention.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import paged_cache
import triton_paged_attention
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, alternate, time_generation
from benchmarks.plotting import COLOURS, GREY, bars, panels, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
from benchmarks.workloads import uniform
from common.errors import UserError
from forward.model import Model
from paged_cache import PagedEngine

PHASE, BEFORE = "06_triton_paged_attention", "05_paged_cache"
CHOICES = ("attention_prefill", "attention_decode", "norms", "rope", "activation", "projections", "sampling")
REQUESTS, PROMPT, OUTPUT = 64, 512, 64


def run(options: BenchOptions) -> Evidence:
    """One full batch through both phases, and through this one with one kind of kernel left to torch."""
    if options.device.type != "cuda":
        raise UserError(f"device is {options.device.type!r}, but phase 06 is measured on 'cuda' only")
    runs = [measured for target in targets(options) for measured in variants(target)]
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


def variants(options: BenchOptions) -> list[Run]:
    """Every variant on the same requests, in alternating order."""
    model, name = load_target(options), options.model or ""
    requests, output = (16, 16) if options.quick else (REQUESTS, OUTPUT)
    work = uniform(f"batch-{requests}x{PROMPT}+{output}", requests, PROMPT, output)
    chosen: dict[str, dict[str, Any]] = {BEFORE: {}, PHASE: {}}
    chosen |= {f"{PHASE}, {choice} by torch": {choice: "torch"} for choice in CHOICES}

    def build(variant: str) -> PagedEngine:
        """A new engine each time: seven caches beside each other would not fit."""
        tokens = 2 * requests * (PROMPT + output)
        return load(
            variant,
            model,
            max_rows=requests,
            max_len=PROMPT + output,
            step_tokens=8192,
            cache_bytes=tokens * model.config.kv_bytes_per_token(model.dtype),
            **chosen[variant],
        )

    def once(variant: str, repeat: int) -> Sample:
        return time_generation(build(variant), work.cold(repeat), options.device)

    samples = alternate(
        {variant: partial(once, variant) for variant in chosen},
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
    return (paged_cache if variant == BEFORE else triton_paged_attention).load(model, **options)


def draw(evidence: Evidence, out: Path) -> None:
    """Output tokens per second of every variant."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    figure, panel = panels(len(models))
    for axes, model in zip(panel, models, strict=True):
        found = evidence.find(model=model)
        bars(found, "output_tokens_per_s", axes=axes, gain=False, label=label, colour=colour)
        axes.set_title(f"{model}: {evidence.runs[0].workload}")
    save(figure, out, evidence)


def label(run: Run) -> str:
    """A variant's name, short."""
    return run.variant.removeprefix(f"{PHASE}, ")


def colour(run: Run) -> str:
    """This phase, its variants, and the phase before."""
    if run.variant == PHASE:
        return COLOURS[0]
    return GREY if run.variant == BEFORE else COLOURS[5]
