"""Phase 11 against phase 09: what guessing gains on which text, and where it stops paying.

The tasks are real text for a real model. The sweep over batch sizes counts drafts as right by decree
(`synthetic`), since random weights say nothing that could be guessed: its runs carry `synthetic_length`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

import cuda_graphs
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
from paged_cache import PagedEngine
from speculative import Speculator
from speculative.head import WEIGHTS
from speculative.rejection import classical, coupled, greedy, optimum
from speculative.suffix import Suffixes

PHASE, BEFORE = "11_speculative", "09_cuda_graphs"
TASKS = ("rewriting", "summarizing", "chat")
LENGTH = 3
"""Drafts in the sweep, all of which count as right."""
SYNTHETIC, ADAPTIVE, VAIN = f"{PHASE}, synthetic", f"{PHASE}, synthetic, adaptive", f"{PHASE}, in vain"


def run(options: BenchOptions) -> Evidence:
    """Tasks with every drafter, the sweep over batch sizes, and how often two draws agree."""
    cuda = options.device.type == "cuda"
    runs = Bench(replace(options, model=options.model or "smollm2")).tasks()
    large = "random:qwen3-8b" if cuda and options.model is None else options.model or "smollm2"
    runs += Bench(replace(options, model=large)).sweep()
    runs += agreement(replace(options, model="smollm2"))
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


class Bench:
    """One model and its engines."""

    def __init__(self, options: BenchOptions) -> None:
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        self.options, self.name, self.model = options, options.model or "", load_target(options)
        self.on_cpu = options.device.type != "cuda"

    def tasks(self) -> list[Run]:
        """Requests one after the other, with and without guessing; nothing is found in a prefix cache."""
        tokenizer = Tokenizer(model_folder(self.name))
        common: dict[str, Any] = {"max_rows": 1, "max_len": 1024, "prefix_cache": False}
        engines: dict[str, PagedEngine] = {BEFORE: cuda_graphs.load(self.model, **common)}
        engines[PHASE] = speculative.load(self.model, **common)
        engines[f"{PHASE}, suffix"] = speculative.load(self.model, drafter="suffix", **common)
        for drafter in ("head", "layers"):
            path = WEIGHTS / f"{self.name}-{drafter}.safetensors"
            if path.is_file():
                engines[f"{PHASE}, {drafter}"] = speculative.load(
                    self.model, drafter=drafter, draft_model=str(path), **common
                )
        runs = []
        for name in TASKS:
            work = task(name, tokenizer, 96 if self.on_cpu else 192)
            if self.options.quick:
                work = _short(work)
            runs += self.compare(engines, work, {})
        return runs

    def sweep(self) -> list[Run]:
        """Batch sizes: three drafts that are right, as many as pay, and drafts that are always wrong."""
        sizes, tokens = ([1, 4, 16], 48) if self.on_cpu else ([1, 4, 16, 64, 128, 256], 256)
        if self.options.quick:
            sizes, tokens = sizes[:2], 12
        room = 2 * max(sizes) * (tokens + 80) * self.model.config.kv_bytes_per_token(self.model.dtype)
        common: dict[str, Any] = {"max_rows": max(sizes), "max_len": 1024, "cache_bytes": room}
        made = {"drafter": "synthetic", "draft_length": LENGTH}
        engines = {
            BEFORE: cuda_graphs.load(self.model, **common),
            SYNTHETIC: speculative.load(
                self.model, draft_accept=float(LENGTH), draft_adaptive=False, **made, **common
            ),
            ADAPTIVE: speculative.load(self.model, draft_accept=float(LENGTH), **made, **common),
            VAIN: speculative.load(self.model, draft_accept=0.0, **made, **common),
        }
        runs = []
        for rows in sizes:
            work = uniform(f"batch-{rows}x{tokens}", rows, 64, tokens)
            runs += self.compare(engines, work, {"batch": rows})
        return runs

    def compare(
        self, engines: Mapping[str, PagedEngine], work: Workload, facts: Mapping[str, Any]
    ) -> list[Run]:
        """All engines on one workload, in turn."""
        short = _short(work)
        kept = alternate(
            {name: partial(self.sample, engine, work) for name, engine in engines.items()},
            1 if self.options.quick else self.options.repeats,
            warm={name: partial(self.warm, engine, short) for name, engine in engines.items()},
        )
        return [self.summarize(name, work, samples, facts) for name, samples in kept.items()]

    def warm(self, engine: PagedEngine, work: Workload) -> None:
        """A few tokens; afterwards nothing is left of what was said before."""
        time_replay(engine, work, self.options.device)
        engine.cache.forget()
        drafter = engine.scheduler.drafter
        if isinstance(drafter, Speculator):
            drafter.stats = type(drafter.stats)()
            if isinstance(drafter.source, Suffixes):
                drafter.source.forget()

    def sample(self, engine: PagedEngine, work: Workload, repeat: int) -> Sample:
        """Speed, and what came of the drafts."""
        steps = engine.stats.steps
        found, _ = time_replay(engine, work, self.options.device)
        found["steps"] = float(engine.stats.steps - steps)
        drafter = engine.scheduler.drafter
        if isinstance(drafter, Speculator):
            found["acceptance_fraction"] = drafter.stats.acceptance
            found["tokens_per_step"] = work.output_tokens / (found["steps"] * _together(work))
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
    axes.plot(best, promised, color=GREY, linestyle=":", label="promised by any draft-free coupling")
    for place, (metric, label) in enumerate((("coupled", "the same noise"), ("greedy", "greedy drafts"))):
        values = [run.median(metric) for run in runs]
        axes.plot(best, values, "o-", color=COLOURS[place], label=label)
    axes.set_xlabel("1 - total variation")
    axes.set_ylabel("share of drafts accepted")
    axes.set_title("Sampled drafts")
    axes.legend(loc="upper left")
