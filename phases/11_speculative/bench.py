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
from benchmarks.workloads import Workload, task, uniform
from common.models.hub import model_folder
from common.request import Request
from common.text.tokenizer import Tokenizer
from continuous.seams import NO_DRAFTS, Drafter
from paged_cache import PagedEngine
from speculative import SpeculativeRunner
from speculative.control import DraftController
from speculative.head import WEIGHTS
from speculative.ngram import NGrams
from speculative.proposer import Proposer
from speculative.speculation import Verifier, agreeing
from speculative.stats import SpeculationStats

PHASE, BEFORE = "11_speculative", "09_cuda_graphs"
TASKS = ("rewriting", "summarizing", "chat")
LENGTH = 3
"""Drafts in the sweep, all of which count as right."""
SYNTHETIC = f"{PHASE}, synthetic"
VAIN = f"{PHASE}, in vain"
OFF, WAITING = f"{PHASE}, switched off", f"{BEFORE}, no overlap"
RIGHT = {SYNTHETIC: LENGTH, VAIN: 0, OFF: 0}
"""Drafts that count as right in a step."""
MOST_ITEMS = 2
"""Requests of a task on a CPU."""


class Never(DraftController):
    """A draft controller that never drafts, as if drafting had switched itself off."""

    def decide(self, running: Sequence[Request]) -> None:
        """Return None: there are no drafts."""


def run(options: BenchOptions) -> Evidence:
    """Measure tasks with every drafter, and a sweep over batch sizes.

    A model with random weights (`--model random:SHAPE`) has no text to guess: it is swept, and no more.
    """
    cuda, quick = options.device.type == "cuda", options.quick
    sizes = [1, 4] if quick else [1, 4, 16, 32, 64, 128, 256] if cuda else [1, 16]
    name = options.model or "smollm2"
    runs: list[Run] = []
    if not name.startswith("random:"):
        for ending in ("", APPENDIX):
            length = 7 if cuda else 15
            own = replace(options, model=name)
            runs += Bench(own, ending, max_rows=1, max_len=1024, draft_length=length).tasks()
    swept = "random:qwen3-8b" if cuda and options.model is None else name
    room: dict[str, Any] = {"max_rows": max(sizes), "max_len": 512, "draft_length": LENGTH}
    runs += Bench(replace(options, model=swept), **room).sweep(sizes)
    return evidence_of(PHASE, runs, options)


Contender = tuple[PagedEngine, Drafter]
"""A variant: an engine, and its drafter."""


class Bench(benchmarks.bench.Bench):
    """One model and one engine, in which drafters take turns; without a drafter it is phase 09's engine."""

    def __init__(self, options: BenchOptions, ending: str = "", **given: Any) -> None:
        """Make the engine, by the options `given`.

        ending: of all variants' names, `APPENDIX` or nothing.
        """
        release_memory(options.device)
        super().__init__(options)
        self.ending = ending
        self.given, self.length = {"prefix_cache": False, **given}, int(given["draft_length"])
        self.engine = engine_of(PHASE + ending, self.model, **self.given)

    def other(self, **settings: Any) -> Contender:
        """Return another engine, with the options `settings`, and its own drafter."""
        engine = engine_of(PHASE + self.ending, self.model, **{**self.given, **settings})
        return engine, engine.scheduler.drafter

    def drafter(self, source: Proposer, *, adaptive: bool = True) -> SpeculativeRunner:
        """Return a drafter for the engine, whose drafts `source` makes on the host.

        adaptive: False: always the most drafts, whatever they cost.
        """
        return SpeculativeRunner(source, self.length, adaptive=adaptive)

    def tasks(self) -> list[Run]:
        """Measure requests one after the other, without drafts and by each drafter; no prefix is cached."""
        tokenizer = Tokenizer(model_folder(self.name))
        ngrams = (self.engine, self.drafter(NGrams()))
        contenders: dict[str, Contender] = {BEFORE: (self.engine, NO_DRAFTS), PHASE: ngrams}
        heads: dict[str, dict[str, Any]] = {"head": {}}
        if not self.on_cpu:
            contenders[WAITING] = self.other(drafter="none", overlap=False)
            # What guessing costs where it is off.
            heads["head, always"] = {"draft_adaptive": False}
        if (WEIGHTS / f"{self.name}-head.safetensors").is_file():
            for name, more in heads.items():
                made = self.other(drafter="head", draft_length=None, **more)
                contenders[f"{PHASE}, {name}"] = made
        else:
            print("no weights for head: phases/11_speculative/weights has SmolLM2's only")
        runs = []
        for name in TASKS:
            work = task(name, tokenizer, 96 if self.on_cpu else 192)
            if self.on_cpu:
                work = replace(work, items=work.items[:MOST_ITEMS])
            runs += self.take_turns(contenders, self.short(work))
        return runs

    def sweep(self, sizes: Sequence[int]) -> list[Run]:
        """Measure each batch size with three right drafts, with wrong drafts only, and without drafts."""
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
            runs += self.take_turns(contenders, work, batch=rows)
        return runs

    def take_turns(
        self, contenders: Mapping[str, Contender], work: Workload, **facts: Any
    ) -> list[Run]:
        """Measure contenders (engine and drafter, by variant) on one workload, in turn.

        facts: values added to each run. A run with synthetic drafts also has how many of them are right.
        """
        few = work.first(2, tokens=8)
        timed = {name: partial(self.sample, one, work) for name, one in contenders.items()}
        warm = {name: partial(self.warm, one, few) for name, one in contenders.items()}
        runs = []
        for name, samples in alternate(timed, self.options.repeats, warm=warm).items():
            said: dict[str, Any] = {"synthetic_length": RIGHT[name]} if name in RIGHT else {}
            runs.append(self.run_of(name, work, samples, **facts, **said))
        return runs

    def warm(self, contender: Contender, work: Workload) -> None:
        """Install a drafter in its engine, generate the tokens of `work`, and set its counts to 0."""
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
        """Measure a contender's speed and steps, and its accepted drafts and tokens a step.

        number: not read.
        """
        engine, drafter = contender
        steps = engine.stats.steps
        found, done = time_replay(engine, work, self.device)
        found["steps"] = float(engine.stats.steps - steps)
        if (stats := stats_of(drafter)) is not None:
            found["acceptance_fraction"] = stats.acceptance
            tokens = sum(len(one.token_ids) for one in done)
            together = 1 if work.sequential else len(work.items)
            found["tokens_per_step"] = tokens / (found["steps"] * together)
        return found


def stats_of(drafter: Drafter) -> SpeculationStats | None:
    """Return a drafter's counts of drafts, or None if it makes no drafts."""
    return drafter.stats if isinstance(drafter, SpeculativeRunner) else None


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
