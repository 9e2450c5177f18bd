"""Phase 02 against phase 01: what keeping keys and values is worth, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import benchmarks.bench
import forward
import kv_cache
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Samples, alternate, growth
from benchmarks.peers import Transformers, transformers_version
from benchmarks.plotting import Panel, figure
from benchmarks.targets import targets
from benchmarks.workloads import Workload, uniform
from common.models.hub import model_folder
from forward import Model
from forward.cpu_linear import FlippedLinear
from forward.surgery import clone
from kv_cache import KVCache

PHASE, BEFORE = "02_kv_cache", "01_forward"
PLAIN = f"{PHASE}, PyTorch's product"
"""With `nn.Linear` as PyTorch computes it, as `transformers` does; see `forward/cpu_linear.py`."""
GENERATED = (200, 500, 1000)
PROMPTS = (64, 256, 512)


def run(options: BenchOptions) -> Evidence:
    """One request at a time: 256 tokens beside a peer, then longer outputs, then longer prompts."""
    runs = []
    for target in targets(options, published=True):
        bench = Bench(target)
        runs += bench.main() + bench.longer_prompts()
        # The naive loop computes half a million tokens for its first thousand: a quarter of an hour.
        if bench.on_cpu:
            bench = Bench(replace(target, dtype=torch.bfloat16))
            runs += bench.main(naive=False)
        runs += bench.longer_outputs()
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """The two engines over one model."""

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        self.engines = {BEFORE: forward.load(self.model), PHASE: kv_cache.load(self.model)}

    def main(self, naive: bool = True) -> list[Run]:
        """256 generated tokens, which the naive loop takes minutes for on a CPU."""
        work = uniform("generate-256", 1, 64, 32 if self.quick else 256)
        short = self.timer(self.engines[BEFORE], uniform(work.name, 1, 64, 4))
        slow = {BEFORE: self.timer(self.engines[BEFORE], work)} if naive else {}
        once = 1 if self.on_cpu else 0  # half a minute, in which nothing else may run
        runs = self.compare(
            slow, work, 1, repeats=once, warm={BEFORE: lambda: short(0)}, cached=False
        )
        contenders = {PHASE: self.timer(self.engines[PHASE], work)}
        if any(isinstance(module, FlippedLinear) for module in self.model.modules()):
            contenders[PLAIN] = self.timer(kv_cache.load(unflipped(self.model)), work)
        if transformers_version() and not self.name.startswith("random:"):
            peer = Transformers(model_folder(self.name), device=self.device, dtype=self.dtype)
            contenders[transformers_version()] = lambda repeat: peer.measure(work.cold(repeat))
        return runs + self.compare(contenders, work, 1)

    def longer_outputs(self) -> list[Run]:
        """Rates up to 200, 500 and 1,000 tokens, all from one generation; on a CPU the loop ends at 200."""
        all_points = (8, 16, 32) if self.quick else GENERATED
        runs = []
        for variant, engine in self.engines.items():
            points = all_points[:1] if variant == BEFORE and self.on_cpu else all_points
            work = uniform(f"generate-{all_points[-1]}", 1, 16, points[-1])
            for count, samples in growth(engine, work, points).items():
                part = uniform(work.name, 1, 16, count)
                cached = variant == PHASE
                found = self.run_of(variant, part, samples, 1, cached=cached, generated=count)
                runs.append(found)
        return runs

    def longer_prompts(self) -> list[Run]:
        """32 generated tokens after prompts of 64, 256 and 512."""
        runs = []
        repeats = 1 if self.on_cpu else self.options.repeats
        for length in PROMPTS[:1] if self.quick else PROMPTS:
            work = uniform(f"prompt-{length}", 1, length, 32)
            timed = {name: self.timer(engine, work) for name, engine in self.engines.items()}
            for variant, kept in alternate(timed, repeats, warm={}).items():
                cached = variant == PHASE
                runs.append(self.run_of(variant, work, kept, 1, cached=cached, prompt=length))
        return runs

    def run_of(
        self,
        variant: str,
        work: Workload,
        samples: Samples,
        roofline_batch: int = 0,
        **facts: Any,
    ) -> Run:
        """Evidence of one variant, with the bytes of its cache."""
        if variant in (PHASE, PLAIN):
            columns = work.prompt_lens[0] + work.output_lens[0] - 1
            size = KVCache.bytes_needed(self.config, 1, columns, self.dtype)
            for sample in samples.kept:
                sample["kv_cache_bytes"] = float(size)
        return super().run_of(variant, work, samples, roofline_batch, **facts)


def unflipped(model: Model) -> Model:
    """The same weights, multiplied as PyTorch would."""
    plain = clone(model)
    for module in plain.modules():
        if isinstance(module, FlippedLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return plain


draw = figure(
    Panel("{model} in {dtype}: {gain} the tokens a second at the greatest length", x="generated"),
    each=("model",),
)
