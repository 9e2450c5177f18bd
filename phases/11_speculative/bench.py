"""Phase 11 against phase 09: what guessing gains on which text, and where it stops paying.

The tasks are real text for a real model. The sweep over batch sizes counts drafts as right by decree
(`synthetic`), since random weights say nothing that could be guessed: its runs carry `synthetic_length`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

import speculative
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, Samples, alternate, summarize
from benchmarks.plotting import COLOURS, GREY, lines, panels, save
from benchmarks.replay import time_replay
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target
from benchmarks.workloads import Item, Workload, task, uniform
from common.models.hub import model_folder
from common.text.tokenizer import Tokenizer
from continuous.runner import agreeing
from continuous.seams import NO_DRAFTS, Drafter
from paged_cache import Parts
from speculative import PRESET, Speculate, Speculator
from speculative.control import Control
from speculative.head import WEIGHTS
from speculative.rejection import classical, coupled, greedy, optimum
from speculative.suffix import Suffixes

PHASE, BEFORE = "11_speculative", "09_cuda_graphs"
TASKS = ("rewriting", "summarizing", "chat")
LENGTH = 3
"""Drafts in the sweep, all of which count as right."""
SYNTHETIC, ADAPTIVE, VAIN = f"{PHASE}, synthetic", f"{PHASE}, synthetic, adaptive", f"{PHASE}, in vain"


def run(options: BenchOptions) -> Evidence:
    """Tasks with every drafter, the sweep over batch sizes, and how often two draws agree.

    A model with random weights (`--model random:SHAPE`) has no text to guess: it is swept, and no more.
    """
    cuda, quick = options.device.type == "cuda", options.quick
    tokens = 12 if quick else 256 if cuda else 48
    sizes = [1, 4] if quick else [1, 4, 16, 64, 128, 256] if cuda else [1, 4, 16]
    name = options.model or "smollm2"
    runs: list[Run] = []
    if not name.startswith("random:"):
        runs += Bench(replace(options, model=name), max_rows=1, max_len=1024).tasks()
    swept = "random:qwen3-8b" if cuda and options.model is None else name
    room = {"max_rows": max(sizes), "max_len": 512}
    runs += Bench(replace(options, model=swept), **room).sweep(sizes, tokens)
    runs += agreement(replace(options, model=name))
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


class Bench:
    """One model and one engine, in which drafters take turns; without one it is phase 09's."""

    def __init__(self, options: BenchOptions, **sizes: Any) -> None:
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        self.options, self.name, self.model = options, options.model or "", load_target(options)
        self.given = {**sizes, "prefix_cache": False, "draft_length": 8}
        self.engine = speculative.load(self.model, **self.given)

    def drafter(self, **settings: Any) -> Speculator:
        """A drafter for the engine, as the feature would make it."""
        chosen = PRESET.choose(self.given, self.options.device)
        parts = Parts(self.engine.runner.model, chosen.sizes)
        parts.features = {feature.name: feature for feature in chosen.installed}
        parts.usual |= {"block_size": self.engine.cache.block_size}
        feature = Speculate(**settings)
        made = Speculator(feature.source(parts), Control(feature.length, adaptive=feature.draft_adaptive))
        return made

    def tasks(self) -> list[Run]:
        """Requests one after the other, with and without guessing; nothing is found in a prefix cache."""
        tokenizer = Tokenizer(model_folder(self.name))
        drafters: dict[str, Drafter] = {BEFORE: NO_DRAFTS, PHASE: self.drafter(drafter="ngram")}
        drafters[f"{PHASE}, suffix"] = self.drafter(drafter="suffix")
        for kind in ("head", "layers"):
            path = WEIGHTS / f"{self.name}-{kind}.safetensors"
            if path.is_file():
                drafters[f"{PHASE}, {kind}"] = self.drafter(drafter=kind, draft_model=str(path))
        runs = []
        for name in TASKS:
            work = task(name, tokenizer, 192 if self.options.device.type == "cuda" else 96)
            runs += self.compare(drafters, _short(work) if self.options.quick else work, {})
        return runs

    def sweep(self, sizes: Sequence[int], tokens: int) -> list[Run]:
        """Batch sizes: three drafts that are right, as many as pay, and drafts that are always wrong."""
        always = {"drafter": "synthetic", "draft_length": LENGTH, "draft_accept": float(LENGTH)}
        drafters: dict[str, Drafter] = {
            BEFORE: NO_DRAFTS,
            SYNTHETIC: self.drafter(draft_adaptive=False, **always),
            ADAPTIVE: self.drafter(**always),
            VAIN: self.drafter(**{**always, "draft_accept": 0.0}),
        }
        runs = []
        for rows in sizes:
            work = uniform(f"batch-{rows}x{tokens}", rows, 64, tokens)
            runs += self.compare(drafters, work, {"batch": rows})
        return runs

    def compare(self, drafters: Mapping[str, Drafter], work: Workload, facts: Mapping[str, Any]) -> list[Run]:
        """All drafters on one workload, in turn."""
        kept = alternate(
            {name: partial(self.sample, drafter, work) for name, drafter in drafters.items()},
            1 if self.options.quick else self.options.repeats,
            warm={name: partial(self.warm, drafter, _short(work)) for name, drafter in drafters.items()},
        )
        return [self.summarize(name, work, samples, facts) for name, samples in kept.items()]

    def warm(self, drafter: Drafter, work: Workload) -> None:
        """Put a drafter into the engine, and say a few tokens; afterwards it remembers no text."""
        self.engine.scheduler.drafter = drafter
        self.engine.runner.agree = agreeing
        if isinstance(drafter, Speculator):
            drafter.attach(self.engine)
        time_replay(self.engine, work, self.options.device)
        if isinstance(drafter, Speculator):
            drafter.stats = type(drafter.stats)()
            if isinstance(drafter.source, Suffixes):
                drafter.source.forget()

    def sample(self, drafter: Drafter, work: Workload, repeat: int) -> Sample:
        """Speed, and what came of the drafts."""
        steps = self.engine.stats.steps
        found, done = time_replay(self.engine, work, self.options.device)
        found["steps"] = float(self.engine.stats.steps - steps)
        if isinstance(drafter, Speculator):
            found["acceptance_fraction"] = drafter.stats.acceptance
            tokens = sum(len(one.token_ids) for one in done)
            found["tokens_per_step"] = tokens / (found["steps"] * _together(work))
            found["tokens_per_verified_step"] = drafter.stats.tokens_per_step
        return found

    def summarize(self, variant: str, work: Workload, samples: Samples, facts: Mapping[str, Any]) -> Run:
        """Evidence of one variant; what is synthetic says so."""
        options = dict(facts)
        if variant in (SYNTHETIC, ADAPTIVE, VAIN):
            options["synthetic_length"] = 0 if variant == VAIN else LENGTH
        return summarize(variant, work, samples, model=self.name, dtype=self.options.dtype, options=options)


def _together(work: Workload) -> int:
    return 1 if work.sequential else len(work.items)


def _short(work: Workload) -> Workload:
    items = tuple(Item(item.prompt, 8) for item in work.items[:2])
    return replace(work, name=f"{work.name}[:2]", items=items)


# How often the drafter's token is the model's.


def agreement(options: BenchOptions) -> list[Run]:
    """Sampled drafts: the optimum, 1 - total variation, and what three ways reach.

    Over pairs of distributions: logits are normal numbers, the drafter's are those and a little noise, from
    nearly the same to quite another. Classical acceptance is the optimum; it pays with a text that depends on
    the drafter.
    """
    work = uniform("agreement", 1, 1, 1)
    runs = []
    for spread in (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5):
        samples = Samples()
        for seed in range(4 if options.quick else 12):
            generator = torch.Generator().manual_seed(seed)
            target = 3.5 * torch.randn(2000, generator=generator)
            p = target.softmax(0)
            q = (target + spread * torch.randn(2000, generator=generator)).softmax(0)
            samples.kept.append(
                {
                    "seconds": 0.0,
                    "optimum": float(optimum(p, q)),
                    "classical": float(classical(p, q)),
                    "coupled": coupled(p, q, 3000, seed),
                    "greedy": float(greedy(p, q)),
                }
            )
        facts = {"spread": spread}
        runs.append(
            summarize(PHASE, work, samples, model=options.model or "", dtype=options.dtype, options=facts)
        )
    return runs


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Tokens a step by drafter and task, speed over batch size, and acceptance against the optimum."""
    figure, (left, middle, right) = panels(3, height=3.4)
    _tasks(evidence, left)
    runs = [run for run in evidence.runs if "batch" in run.options]
    lines(runs, x="batch", metric="output_tokens_per_s", axes=middle, by=_label, log_x=True, log_y=True)
    middle.set_xlabel("requests")
    middle.set_title(f"{LENGTH} synthetic drafts a step")
    _agreement(evidence, right)
    save(figure, out, evidence)


def _label(run: Run) -> str:
    return "ngram" if run.variant == PHASE else run.variant.removeprefix(f"{PHASE}, ")


def _tasks(evidence: Evidence, axes: Axes) -> None:
    found = [run for run in evidence.runs if "tokens_per_step" in run.metrics and "batch" not in run.options]
    tasks = list(dict.fromkeys(run.workload for run in found))
    variants = list(dict.fromkeys(run.variant for run in found))
    for place, variant in enumerate(variants):
        for row, name in enumerate(tasks):
            (one,) = (run for run in found if (run.variant, run.workload) == (variant, name))
            value = one.median("tokens_per_step")
            at = row + (place - (len(variants) - 1) / 2) * 0.8 / len(variants)
            label = _label(one) if row == 0 else None
            axes.barh(at, value, height=0.7 / len(variants), color=COLOURS[place], label=label)
            gain = one.median("output_tokens_per_s") / evidence.one(BEFORE, name).median(
                "output_tokens_per_s"
            )
            axes.annotate(
                f"{value:.2f} ({gain:.2f}× the speed)",
                (value, at),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
    axes.axvline(1.0, color=GREY, linewidth=1.0)
    axes.set_yticks(range(len(tasks)), [name.rsplit("-", 1)[0] for name in tasks])
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xlabel("tokens a step")
    axes.set_title("What can be guessed")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right")


def _agreement(evidence: Evidence, axes: Axes) -> None:
    runs = [run for run in evidence.runs if "spread" in run.options]
    best = [run.median("optimum") for run in runs]
    promised = [value / (2 - value) for value in best]
    axes.plot(best, best, color=GREY, label="optimum: classical rejection")
    axes.plot(best, promised, color=GREY, linestyle=":", label="the most such a rule can promise")
    for place, (metric, label) in enumerate((("coupled", "the same noise"), ("greedy", "greedy drafts"))):
        values = [run.median(metric) for run in runs]
        axes.plot(best, values, "o-", color=COLOURS[place], label=label)
    axes.set_xlabel("1 - total variation")
    axes.set_ylabel("share of drafts accepted")
    axes.set_title("Sampled drafts")
    axes.legend(loc="upper left")
