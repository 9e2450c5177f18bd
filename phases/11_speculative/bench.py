"""Phase 11 against phase 09: what guessing gains on which text, and where it stops paying.

The tasks are real text for a real model. The sweep over batch sizes counts drafts as right by decree
(`synthetic`), since random weights say nothing that could be guessed: its runs carry `synthetic_length`, and
their variants are called so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Sample, alternate, release_memory
from benchmarks.plotting import Panel, figure
from benchmarks.replay import time_replay
from benchmarks.synthetic_drafter import Synthetic
from benchmarks.targets import load_target
from benchmarks.workloads import Item, Workload, task, uniform
from common.models.hub import model_folder
from common.request import Request
from common.text.tokenizer import Tokenizer
from continuous.seams import NO_DRAFTS, Drafter
from forward.model import Model
from paged_cache import PagedEngine
from speculative import SpeculativeRunner
from speculative.control import DraftController
from speculative.head import WEIGHTS
from speculative.ngram import NGrams
from speculative.speculation import Proposer, Verifier, agreeing
from speculative.stats import SpeculationStats

PHASE, BEFORE = "11_speculative", "09_cuda_graphs"
TASKS = ("rewriting", "summarizing", "chat")
LENGTH = 3
"""Drafts in the sweep, all of which count as right."""
SYNTHETIC = f"{PHASE}, synthetic"
RATE = "output_tokens_per_s"
VAIN = f"{PHASE}, in vain"
OFF, WAITING = f"{PHASE}, switched off", f"{BEFORE}, no overlap"
MOST_ITEMS = 2
"""Requests of a task on a CPU."""


class Never(DraftController):
    """Drafting has switched itself off, and stays so."""

    def decide(self, running: Sequence[Request]) -> None:
        """Return None: there are no drafts."""


def run(options: BenchOptions) -> Evidence:
    """Tasks with every drafter, and the sweep over batch sizes.

    A model with random weights (`--model random:SHAPE`) has no text to guess: it is swept, and no more.
    """
    cuda, quick = options.device.type == "cuda", options.quick
    sizes = [1, 4] if quick else [1, 4, 16, 32, 64, 128, 256] if cuda else [1, 16]
    name = options.model or "smollm2"
    runs: list[Run] = []
    if not name.startswith("random:"):
        own = replace(options, model=name)
        runs += tasks(own, "") + tasks(own, APPENDIX)
    swept = "random:qwen3-8b" if cuda and options.model is None else name
    room: dict[str, Any] = {"max_rows": max(sizes), "max_len": 512, "draft_length": LENGTH}
    runs += Bench(replace(options, model=swept), **room).sweep(sizes)
    return evidence_of(PHASE, runs, options)


def tasks(options: BenchOptions, ending: str) -> list[Run]:
    """Requests one after the other, with and without guessing; nothing is found in a prefix cache."""
    cuda = options.device.type == "cuda"
    tokenizer = Tokenizer(model_folder(options.model or ""))
    model = load_target(options)
    sizes: dict[str, Any] = {"max_rows": 1, "max_len": 1024, "draft_length": 7 if cuda else 15}
    bench = Bench(options, model, ending, **sizes)
    ngrams = (bench.engine, bench.drafter(NGrams()))
    contenders: dict[str, Contender] = {BEFORE: (bench.engine, NO_DRAFTS), PHASE: ngrams}
    heads: dict[str, dict[str, Any]] = {"head": {}}
    if cuda:
        contenders[WAITING] = bench.other(drafter="none", overlap=False)
        heads["head, always"] = {
            "draft_adaptive": False
        }  # what guessing costs where it is off
    if (WEIGHTS / f"{options.model}-head.safetensors").is_file():
        for name, more in heads.items():
            contenders[f"{PHASE}, {name}"] = bench.other(
                drafter="head", draft_length=None, **more
            )
    else:
        print("no weights for head: phases/11_speculative/weights has SmolLM2's only")
    runs = []
    for name in TASKS:
        work = task(name, tokenizer, 192 if cuda else 96)
        if not cuda:
            work = replace(work, items=work.items[:MOST_ITEMS])
        runs += bench.take_turns(contenders, _short(work) if options.quick else work, {})
    return runs


Contender = tuple[PagedEngine, Drafter]
"""A variant: an engine, and its drafter."""


class Bench(benchmarks.bench.Bench):
    """One model and one engine, in which drafters take turns; without one it is phase 09's."""

    def __init__(
        self, options: BenchOptions, model: Model | None = None, ending: str = "", **given: Any
    ) -> None:
        """ending: of all variants' names, `APPENDIX` or nothing."""
        release_memory(options.device)
        super().__init__(options, model)
        self.ending = ending
        self.given, self.length = {"prefix_cache": False, **given}, int(given["draft_length"])
        self.engine = engine_of(PHASE + ending, self.model, **self.given)

    def other(self, **settings: Any) -> Contender:
        """Return an engine of its own, whose drafter is part of it."""
        engine = engine_of(PHASE + self.ending, self.model, **{**self.given, **settings})
        return engine, engine.scheduler.drafter

    def drafter(self, source: Proposer, *, adaptive: bool = True) -> SpeculativeRunner:
        """A drafter for the engine that guesses on the host, as the feature would make it."""
        return SpeculativeRunner(source, self.length, adaptive=adaptive)

    def sweep(self, sizes: Sequence[int]) -> list[Run]:
        """Batch sizes: three right drafts, drafts that are always wrong, and none."""
        off = self.drafter(Synthetic(LENGTH))
        off.control = Never(LENGTH)
        contenders: dict[str, Contender] = {
            BEFORE: (self.engine, NO_DRAFTS),
            SYNTHETIC: (self.engine, self.drafter(Synthetic(LENGTH), adaptive=False)),
            VAIN: (self.engine, self.drafter(Synthetic(0))),
            OFF: (self.engine, off),
        }
        runs = []
        for rows in sizes:
            tokens = 12 if self.quick else 32 if self.on_cpu else 256 if rows == 1 else 128
            work = uniform(f"batch-{rows}x{tokens}", rows, 64, tokens)
            runs += self.take_turns(contenders, work, {"batch": rows})
        return runs

    def take_turns(
        self, contenders: Mapping[str, Contender], work: Workload, facts: Mapping[str, Any]
    ) -> list[Run]:
        """All contenders on one workload, in turn."""
        timed = {name: partial(self.sample, one, work) for name, one in contenders.items()}
        warm = {
            name: partial(self.warm, one, _short(work)) for name, one in contenders.items()
        }
        runs = []
        for name, samples in alternate(timed, self.options.repeats, warm=warm).items():
            right = {
                SYNTHETIC: LENGTH,
                VAIN: 0,
                OFF: 0,
            }  # what is synthetic says so
            said: dict[str, Any] = {"synthetic_length": right[name]} if name in right else {}
            runs.append(self.run_of(name + self.ending, work, samples, **facts, **said))
        return runs

    def warm(self, contender: Contender, work: Workload) -> None:
        """Put a drafter into its engine, and say a few tokens; afterwards it remembers no text."""
        engine, drafter = contender
        engine.scheduler.drafter = drafter
        agree = agreeing
        if isinstance(drafter, SpeculativeRunner):
            drafter.attach(engine)
            agree = drafter.source.agree
        engine.runner.verifier = Verifier(engine.scheduler.rows.tokens, agree)
        time_replay(engine, work, self.device)
        if (stats := stats_of(drafter)) is not None:
            stats.steps = 0
            stats.drafted = []
            stats.accepted = []

    def sample(self, contender: Contender, work: Workload, number: int) -> Sample:
        """Speed, and what came of the drafts."""
        engine, drafter = contender
        steps = engine.stats.steps
        found, done = time_replay(engine, work, self.device)
        found["steps"] = float(engine.stats.steps - steps)
        if (stats := stats_of(drafter)) is not None:
            found["acceptance_fraction"] = stats.acceptance
            tokens = sum(len(one.token_ids) for one in done)
            found["tokens_per_step"] = tokens / (found["steps"] * _together(work))
            found["tokens_per_verified_step"] = stats.tokens_per_step
        return found


def stats_of(drafter: Drafter) -> SpeculationStats | None:
    """What a drafter counts, if it guesses."""
    return None if drafter is NO_DRAFTS else getattr(drafter, "stats", None)


def _together(work: Workload) -> int:
    return 1 if work.sequential else len(work.items)


def _short(work: Workload) -> Workload:
    items = tuple(Item(item.prompt, 8) for item in work.items[:2])
    return replace(work, name=f"{work.name}[:2]", items=items)


draw = figure(
    Panel(
        "A step yields up to {most} tokens",
        "tokens_per_step",
        {"batch": ""},
        label="{workload}, {name}",
    ),
    Panel("Three synthetic drafts a step, by requests", x="batch", log="xy"),
    height=4.6,
)
