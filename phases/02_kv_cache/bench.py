"""Phase 02 against phase 01: what keeping keys and values is worth, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import forward
import kv_cache
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Samples, Watch, alternate, time_generation, timer
from benchmarks.peers import Transformers, transformers_version
from benchmarks.plotting import lines, panels, save
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, uniform
from common.events import generate
from common.models.hub import model_folder
from common.sampling.params import SamplingParams
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
        # The naive loop computes 130,000 tokens for its first 500, and half a million for its first thousand.
        # On two cores these are minutes in bfloat16, which both phases take then, and a quarter of an hour.
        if options.device.type == "cpu":
            bench = Bench(replace(target, dtype=torch.bfloat16))
            runs += bench.main(naive=False)
        runs += bench.longer_outputs()
    return collect(
        PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json()
    )


class Bench:
    """The two engines over one model, and how they are measured."""

    def __init__(self, options: BenchOptions) -> None:
        self.model = model = load_target(options)
        self.options = options
        self.name = options.model or ""
        self.config = model.config
        self.engines = {BEFORE: forward.load(model), PHASE: kv_cache.load(model)}
        self.top = ceilings(options.device, options.dtype)

    def main(self, naive: bool = True) -> list[Run]:
        """256 generated tokens, which the naive loop takes minutes for on a CPU."""
        work = uniform("generate-256", 1, 64, 32 if self.options.quick else 256)
        device = self.options.device
        short = uniform(work.name, 1, 64, 4)
        slow = alternate(
            {BEFORE: lambda _: time_generation(self.engines[BEFORE], work, device)}
            if naive
            else {},
            repeats=self.options.repeats,
            warm={BEFORE: lambda: time_generation(self.engines[BEFORE], short, device)},
        )
        contenders = {PHASE: timer(self.engines[PHASE], work, device)}
        if any(isinstance(module, FlippedLinear) for module in self.model.modules()):
            contenders[PLAIN] = timer(kv_cache.load(unflipped(self.model)), work, device)
        if transformers_version() and not self.name.startswith("random:"):
            peer = Transformers(
                model_folder(self.name), device=device, dtype=self.options.dtype
            )
            contenders[transformers_version()] = lambda repeat: peer.measure(work.cold(repeat))
        return [
            self.summarize(variant, work, samples, variant != BEFORE)
            for variant, samples in (
                slow | alternate(contenders, self.options.repeats)
            ).items()
        ]

    def longer_outputs(self) -> list[Run]:
        """Rates up to 200, 500 and 1,000 tokens, all from one generation; on a CPU the loop ends at 500."""
        all_points = (8, 16, 32) if self.options.quick else GENERATED
        runs = []
        for variant, engine in self.engines.items():
            slow = variant == BEFORE and self.options.device.type == "cpu"
            points = all_points[:-1] if slow else all_points
            work = uniform(f"generate-{all_points[-1]}", 1, 16, points[-1])
            generate(
                engine, work.prompts, SamplingParams(max_tokens=4, ignore_eos=True)
            )  # warm up
            with Watch() as watch:
                (done,) = generate(engine, work.prompts, work.params)
            for count in points:
                seconds = done.times[count - 1] - done.arrival
                samples = Samples(
                    [{"seconds": seconds, "output_tokens_per_s": count / seconds}],
                    [watch.noise],
                )
                part = uniform(work.name, 1, 16, count)
                runs.append(
                    self.summarize(variant, part, samples, variant == PHASE, generated=count)
                )
        return runs

    def longer_prompts(self) -> list[Run]:
        """32 generated tokens after prompts of 64, 256 and 512."""
        runs = []
        for length in PROMPTS[:1] if self.options.quick else PROMPTS:
            work = uniform(f"prompt-{length}", 1, length, 32)
            samples = alternate(
                {
                    variant: timer(engine, work, self.options.device)
                    for variant, engine in self.engines.items()
                },
                repeats=1 if self.options.device.type == "cpu" else self.options.repeats,
                warm={variant: lambda: None for variant in self.engines},
            )
            for variant, kept in samples.items():
                runs.append(
                    self.summarize(variant, work, kept, variant == PHASE, prompt=length)
                )
        return runs

    def summarize(
        self, variant: str, work: Workload, samples: Samples, cached: bool, **options: int
    ) -> Run:
        """Evidence of one variant; its roofline is that of the work its algorithm has to do."""
        if variant in (PHASE, PLAIN):
            columns = work.prompt_lens[0] + work.output_lens[0] - 1
            for sample in samples.kept:
                size = KVCache.bytes_needed(self.config, 1, columns, self.options.dtype)
                sample["kv_cache_bytes"] = float(size)
        return summarize_generation(
            variant,
            work,
            samples,
            model=self.name,
            config=self.config,
            dtype=self.options.dtype,
            top=self.top,
            batch=1,
            cached=cached,
            options=options,
        )


def unflipped(model: Model) -> Model:
    """The same weights, multiplied as PyTorch would."""
    plain = clone(model)
    for module in plain.modules():
        if isinstance(module, FlippedLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return plain


def draw(evidence: Evidence, out: Path) -> None:
    """The mean rate of both phases against the number of generated tokens, a panel a model."""
    models = list(dict.fromkeys(run.model for run in evidence.runs))
    figure, panel = panels(len(models))
    for axes, model in zip(panel, models, strict=True):
        runs = [run for run in evidence.find(model=model) if "generated" in run.options]
        lines(runs, x="generated", metric="output_tokens_per_s", axes=axes)
        axes.set_xlabel("tokens generated")
        last = max(run.options["generated"] for run in runs if run.variant == BEFORE)
        new, old = (
            evidence.one(name, model=model, generated=last).median("output_tokens_per_s")
            for name in (PHASE, BEFORE)
        )
        axes.set_title(
            f"{model} in {runs[0].dtype}: {new / old:.2g} times phase 01's rate after {last:,} tokens"
        )
    save(figure, out, evidence)
