"""Phase 10 against phase 09: fewer bits, and how much faster. `benchmarks/quality.py` has what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.published import PUBLISHED, SIZES, draw_beside_peers, in_turns, one_by_one
from benchmarks.targets import load_target
from benchmarks.workloads import uniform
from paged_cache import PagedEngine

PHASE, BEFORE = "10_quant", "09_cuda_graphs"
SCHEMES_ON_CPU = ("int8", "w8a8", "int4")
SCHEMES_ON_GPU = ("fp8", "int4")
SMALL_HEAD = f"{PHASE} int4, int4 head"


def run(options: BenchOptions) -> Evidence:
    """On a CPU the speed of the small model; on a GPU that of large ones."""
    runs: list[Run] = []
    if options.device.type == "cuda":
        names = [options.model] if options.model else ["random:qwen3-8b", "random:qwen3-0.6b"]
        for name in names:
            runs += on_gpu(replace(options, model=name))
            torch.cuda.empty_cache()
    else:
        runs += on_cpu(replace(options, model=options.model or "smollm2"))
    return evidence_of(PHASE, runs, options)


def on_cpu(options: BenchOptions) -> list[Run]:
    """One request, and 16 at a time."""
    model = load_target(options)
    sizes = {"max_rows": 16, "max_len": 512}
    engines = {name: engine_of(name, model, **sizes) for name in (BEFORE, BEFORE + APPENDIX)}
    for scheme, ending in product(SCHEMES_ON_CPU, ("", APPENDIX)):
        name = f"{PHASE} {scheme}{ending}"
        engines[name] = engine_of(name, model, quantization=scheme, **sizes)
    runs = []
    for batch, output in ((1, 48), (16, 16)):
        work = uniform(
            f"decode-{batch}x32+{output}", batch, 32, 4 if options.quick else output
        )
        runs += in_turns(engines, work, options, roofline=False, batch=batch)
    long = uniform("prompt-1x384", 1, 64 if options.quick else 384, 1)
    return runs + in_turns(engines, long, options, roofline=False, batch=1)


def on_gpu(options: BenchOptions) -> list[Run]:
    """The published workloads, on one engine after the other: each fills a good part of the memory."""
    model = load_target(options)
    ways: dict[str, dict[str, Any]] = {BEFORE: {}}
    ways |= {f"{PHASE} {scheme}": {"quantization": scheme} for scheme in SCHEMES_ON_GPU}
    keys = {"quantization": "fp8", "kv_cache": "fp8", "block_size": 128}
    ways |= {f"{PHASE} fp8, fp8 keys": keys}
    head = {SMALL_HEAD: {"quantization": "int4", "head": "int4"}}

    def made(ways: dict[str, dict[str, Any]]) -> dict[str, Callable[[], PagedEngine]]:
        return {
            way + ending: partial(engine_of, way + ending, model, **(SIZES | given))
            for (way, given), ending in product(ways.items(), ("", APPENDIX))
        }

    runs = one_by_one(made(ways), options, roofline=False)
    # Many requests read a head as fast as one does.
    return runs + one_by_one(made(head), options, PUBLISHED[:1], roofline=False)


draw = draw_beside_peers
