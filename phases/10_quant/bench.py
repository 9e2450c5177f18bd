"""Phase 10 against phase 09: fewer bits, and how much faster. `benchmarks/quality.py` has what they cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import release_memory
from benchmarks.published import PUBLISHED, SIZES, draw_beside_peers
from benchmarks.workloads import uniform

PHASE, BEFORE = "10_quant", "09_cuda_graphs"
ON_CPU: dict[str, dict[str, Any]] = {
    BEFORE: {},
    **{f"{PHASE} {scheme}": {"quantization": scheme} for scheme in ("int8", "w8a8", "int4")},
}
ON_GPU: dict[str, dict[str, Any]] = {
    BEFORE: {},
    **{f"{PHASE} {scheme}": {"quantization": scheme} for scheme in ("fp8", "int4")},
    f"{PHASE} fp8, fp8 keys": {"quantization": "fp8", "kv_cache": "fp8", "block_size": 128},
}
SMALL_MODEL = "random:qwen3-0.6b"
SMALL_HEAD = {f"{PHASE} int4, int4 head": {"quantization": "int4", "head": "int4"}}


def run(options: BenchOptions) -> Evidence:
    """Measure the speed of each format: on a CPU with a small model, on a GPU with large ones."""
    cuda = options.device.type == "cuda"
    usual = ("random:qwen3-8b", SMALL_MODEL) if cuda else ("smollm2",)
    runs: list[Run] = []
    for name in [options.model] if options.model else usual:
        runs += Bench(replace(options, model=name)).measured()
        release_memory(options.device)
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """One model in several formats, with the appendix and without."""

    def measured(self) -> list[Run]:
        """Measure one request, 16 at a time, and a prompt on a CPU; the published workloads on a GPU."""
        if not self.on_cpu:
            made, head = self.makers(ON_GPU, **SIZES), self.makers(SMALL_HEAD, **SIZES)
            if self.name == SMALL_MODEL:
                return self.one_by_one(made, PUBLISHED[:1])
            # Many requests read a head as fast as one does.
            return self.one_by_one(made) + self.one_by_one(head, PUBLISHED[:1])
        made = self.makers(ON_CPU, max_rows=16, max_len=512)
        engines = {name: make() for name, make in made.items()}
        works = [
            uniform("decode-1x32+48", 1, 32, 48),
            uniform("decode-16x32+16", 16, 32, 16),
            uniform("prompt-1x384", 1, 384, 1),
        ]
        return [run for w in works for run in self.race(engines, w, batch=len(w.items))]

    def makers(
        self, formats: dict[str, dict[str, Any]], **sizes: Any
    ) -> dict[str, partial[Any]]:
        """Return functions that make the engine of each format, with and without the appendix, by name.

        formats: the options of each format, by its name. sizes: further options of every engine.
        """
        return {
            name + ending: partial(engine_of, name + ending, self.model, **(sizes | given))
            for (name, given), ending in product(formats.items(), ("", APPENDIX))
        }


draw = draw_beside_peers
