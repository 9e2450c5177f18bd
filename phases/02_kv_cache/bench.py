"""Phase 02 against phase 01: what keeping keys and values is worth, and how it grows."""

from __future__ import annotations

from dataclasses import replace

import torch

import benchmarks.bench
import forward
import kv_cache
from benchmarks.evidence import BenchOptions, Run
from benchmarks.measure import growth
from benchmarks.peers import Transformers, transformers_version
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import uniform
from common.models.hub import model_folder

PHASE, BEFORE = "02_kv_cache", "01_forward"
GENERATED = (200, 500, 1000)
PROMPTS = (64, 256, 512)


class Bench(benchmarks.bench.Bench):
    """Benchmark of phases 01 and 02 with one model, one request at a time."""

    phase = PHASE
    published = True

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        self.engines = {BEFORE: forward.load(self.model), PHASE: kv_cache.load(self.model)}

    def measured(self) -> list[Run]:
        """Return the runs (results) of `main`, `longer_prompts` and `longer_outputs`.

        On a CPU, `main` (without phase 01) and `longer_outputs` are measured in bfloat16 as well.
        """
        runs = self.main() + self.longer_prompts()
        if not self.on_cpu:
            return runs + self.longer_outputs()
        # The naive loop computes half a million tokens for its first thousand: many minutes.
        other = Bench(replace(self.options, dtype=torch.bfloat16))
        return runs + other.main(naive=False) + other.longer_outputs()

    def main(self, naive: bool = True) -> list[Run]:
        """Return runs (results) of 256 generated tokens: both phases, and `transformers` if it is installed.

        naive: whether phase 01 is measured, which takes minutes on a CPU.
        """
        work = self.short(uniform("generate-256", 1, 64, 256))
        few = self.timer(self.engines[BEFORE], work.first(1, tokens=4))
        slow = {BEFORE: self.timer(self.engines[BEFORE], work)} if naive else {}
        runs = self.compare(slow, work, 1, warm={BEFORE: lambda: few(0)}, cached=False)
        contenders = {PHASE: self.timer(self.engines[PHASE], work)}
        if transformers_version() and not self.name.startswith("random:"):
            peer = Transformers(model_folder(self.name), device=self.device, dtype=self.dtype)
            contenders[transformers_version()] = lambda repeat: peer.measure(work.cold(repeat))
        return runs + self.compare(contenders, work, 1)

    def longer_outputs(self) -> list[Run]:
        """Return runs (results): tokens a second up to 200, 500 and 1,000 tokens of one generation a phase.

        On a CPU phase 01 ends at 200.
        """
        all_points = (8, 16, 32) if self.quick else GENERATED
        runs = []
        for variant, engine in self.engines.items():
            points = all_points[:1] if variant == BEFORE and self.on_cpu else all_points
            work = uniform(f"generate-{all_points[-1]}", 1, 16, points[-1])
            for count, samples in growth(engine, work, points).items():
                part = uniform(work.name, 1, 16, count)
                cached = variant == PHASE
                runs.append(
                    self.run_of(variant, part, samples, 1, cached=cached, generated=count)
                )
        return runs

    def longer_prompts(self) -> list[Run]:
        """Return runs (results) of 32 generated tokens after prompts of 64, 256 and 512 tokens."""
        runs = []
        for length in PROMPTS[: 1 if self.quick else None]:
            work = uniform(f"prompt-{length}", 1, length, 32)
            timed = {name: self.timer(engine, work) for name, engine in self.engines.items()}
            cached = {BEFORE: False, PHASE: True}
            once = int(self.on_cpu)
            runs += self.compare(
                timed, work, 1, repeats=once, warm={}, cached=cached, prompt=length
            )
        return runs


run = Bench.run
draw = figure(
    Panel(
        "{model} in {dtype}: {gain} the tokens a second at the greatest length", x="generated"
    ),
    each=("model",),
)
