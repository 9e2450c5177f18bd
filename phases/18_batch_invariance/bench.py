"""Phase 18 against phase 17: requests whose bits depend on the rest of the batch, and the mode's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Run
from benchmarks.measure import Sample, Samples, release_memory
from benchmarks.plotting import Panel, figure
from benchmarks.published import SIZES
from benchmarks.workloads import Item, Workload, workload
from common.events import Completion, generate
from forward.model import Model
from paged_cache import PagedEngine

Outputs = dict[int, Completion]
"""Number of a request in a workload -> what was generated."""

PHASE = "18_batch_invariance"
BEFORE = "17_hybrid_cache"
MODELS = {"cpu": ("smollm2",), "cuda": ("random:qwen3-0.6b", "random:qwen3-8b")}
TIMED = ("offline-256", "prefill-64x1024", "single-512")
"""Workloads in the order of the evidence: the first is the headline."""
VARIANTS = {BEFORE: {"batch_invariant": False}, PHASE: {"batch_invariant": True}}
SCHEDULES = {
    "cpu": ("alone", "alone again", "all at once", "in reverse", "small chunks", "drafts"),
    "cuda": ("all at once", "all again", "in reverse", "alone", "small chunks", "drafts"),
}
"""How the requests are served; every schedule is compared with the first."""
OTHER_ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "small chunks": {"step_tokens": 64, "chunk_tokens": 24},
        "drafts": {"drafter": "ngram", "draft_adaptive": False},
    },
    "cuda": {
        "small chunks": {"step_tokens": 1024, "chunk_tokens": 200, "graphs": False},
        "drafts": {"drafter": "ngram", "draft_adaptive": False},
    },
}
"""Options of schedules that have an engine of their own."""
ALONE = 64
"""The most requests that are served one by one."""
CACHE_SHARE = 0.2
"""Share of the GPU's memory for keys and values of an engine: two engines must fit beside the model."""


def run(options: BenchOptions) -> Evidence:
    """Count requests that differ between schedules, with batch invariance and without; on a GPU, time both.

    On a GPU 1,024 requests of the first model are counted. Of a larger model 128 are counted, with the
    engines that are timed, and half as many timings are taken.
    """
    device = options.device.type
    models = MODELS[device] if options.model is None else (options.model,)
    runs: list[Run] = []
    for name in models:
        own = replace(options, model=name)
        if name == models[0]:
            runs += Bench(own).compared(1024, OTHER_ENGINES[device])
        else:
            own = replace(own, repeats=max(1, options.repeats // 2))
            runs += Bench(own).compared(128, {})
        release_memory(options.device)
    return evidence_of(PHASE, runs, options)


class Bench(benchmarks.bench.Bench):
    """One model, served with batch invariance and without."""

    def compared(self, count: int, others: Mapping[str, dict[str, Any]]) -> list[Run]:
        """Return the timed runs, and for each schedule how many requests differ from the first schedule's.

        count: number of requests, on a GPU. others: schedule -> options of the engines made for it alone.
        """
        work = requests(self.options, count)
        first, *schedules = (
            s for s in SCHEDULES[self.device.type] if s not in OTHER_ENGINES[self.device.type]
        )
        engines = {
            variant: make(self.model, work, **chosen) for variant, chosen in VARIANTS.items()
        }
        runs: list[Run] = []
        if not self.on_cpu:
            for load in TIMED:
                runs += self.race(engines, workload(load))
        known = {variant: serve(engine, work, first) for variant, engine in engines.items()}
        for variant, engine in engines.items():
            for schedule in schedules:
                found = serve(engine, work, schedule)
                runs.append(self.counted(work, variant, known[variant], schedule, found))
        del engine, engines
        for variant, chosen in VARIANTS.items():
            for schedule, more in others.items():
                release_memory(self.device)
                found = serve(make(self.model, work, **chosen, **more), work, schedule)
                runs.append(self.counted(work, variant, known[variant], schedule, found))
        return runs

    def counted(
        self, work: Workload, variant: str, known: Outputs, schedule: str, found: Outputs
    ) -> Run:
        """Return a run that says how many requests have other tokens, or other bits of a log-probability.

        known: completions of the first schedule, by request. found: those of `schedule`, compared with
            `known`.
        """
        pairs = [(known[at], found[at]) for at in found]
        other_tokens = sum(a.token_ids != b.token_ids for a, b in pairs)
        other_bits = sum(a.logprobs != b.logprobs for a, b in pairs)
        sample: Sample = {
            "requests_with_other_tokens": float(other_tokens),
            "requests_with_other_logprobs": float(other_bits),
        }
        samples = Samples([sample] * self.options.repeats)
        return self.run_of(variant, work, samples, schedule=schedule, requests=len(pairs))


def requests(options: BenchOptions, count: int) -> Workload:
    """Return the requests to compare, 16 tokens each: part of `offline-256-small`, on a GPU of `offline-256`.

    count: number of requests, on a GPU; beyond 256 the prompts are repeated with other tokens.
    """
    if options.device.type == "cpu":
        return workload("offline-256-small").first(6 if options.quick else 12, tokens=16)
    work = workload("offline-256")
    count = min(count, 16) if options.quick else count
    copies = [work.cold(copy).prompts for copy in range(-(-count // len(work.items)))]
    items = tuple(
        Item(tuple(prompt), min(item.max_tokens, 16))
        for prompts in copies
        for prompt, item in zip(prompts, work.items, strict=True)
    )
    return replace(work, name=f"offline-256 x {len(copies)}[:{count}]", items=items[:count])


def make(model: Model, work: Workload, **options: Any) -> PagedEngine:
    """Return an engine of this phase for a workload, without drafts unless `options` say otherwise.

    On a CPU all requests of the workload have rows. On a GPU the engine has the sizes of the published
    benchmarks, and `CACHE_SHARE` of the memory for keys and values.
    """
    if model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        sizes = SIZES | {"cache_bytes": int(CACHE_SHARE * memory)}
    else:
        longest = max(a + b for a, b in zip(work.prompt_lens, work.output_lens, strict=True))
        sizes = {"max_rows": len(work.items), "max_len": longest + 16}
    return engine_of("18", model, **{"drafter": "none", **sizes, **options})


def serve(engine: PagedEngine, work: Workload, schedule: str) -> Outputs:
    """Serve a workload with log-probabilities; return each request's completion, by its index.

    schedule: "alone ..." serves up to `ALONE` requests one by one; others all at once, "in reverse" from the
        last.
    """
    prompts = work.prompts
    params = [replace(each, logprobs=0) for each in work.params]
    order = range(len(prompts))[:: -1 if schedule == "in reverse" else 1]
    groups: Sequence[Sequence[int]] = [order]
    if schedule.startswith("alone"):
        groups = [[place] for place in order[:ALONE]]
    found: dict[int, Completion] = {}
    for group in groups:
        done = generate(engine, [prompts[at] for at in group], [params[at] for at in group])
        found |= dict(zip(group, done, strict=True))
    return found


draw = figure(
    Panel(
        "{model}: requests with other bits than at first, without the mode (17) and with it (18)",
        "requests_with_other_logprobs",
        label="{schedule}, {variant:.2}",
    ),
    each=("model",),
)
