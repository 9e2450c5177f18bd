"""Workloads that other engines publish: engines take turns, and their bars stand beside the peers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.evidence import BenchOptions, Run
from benchmarks.measure import alternate_engines, release_memory, summarize
from benchmarks.plotting import Panel, figure
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.workloads import Workload, workload
from paged_cache import PagedEngine

SIZES: dict[str, Any] = {"max_rows": 256, "max_len": 4096, "step_tokens": 16_384}
"""Of engines that serve these workloads."""
PUBLISHED = ("single-512", "offline-256", "prefill-64x1024")


def one_by_one(
    made: Mapping[str, Callable[[], PagedEngine]],
    options: BenchOptions,
    works: Sequence[str] = PUBLISHED,
    *,
    roofline: bool = True,
) -> list[Run]:
    """Time each engine on the workloads, one engine after the other: each fills a good part of the memory."""
    runs = []
    for variant, make in made.items():
        engines = {variant: make()}
        for name in works:
            work = workload(name).first(8, tokens=8) if options.quick else workload(name)
            runs += in_turns(engines, work, options, roofline=roofline)
        del engines
        release_memory(options.device)
    return runs


def in_turns(
    engines: Mapping[str, PagedEngine],
    work: Workload,
    options: BenchOptions,
    *,
    roofline: bool = True,
    **facts: Any,
) -> list[Run]:
    """Time engines in alternating order, each sample after a few tokens of the same requests.

    roofline: that of weights in the model's dtype; leave it out if some are quantized.
    """
    kept = alternate_engines(engines, work, device=options.device, repeats=options.repeats)
    about: dict[str, Any] = {"model": options.model, "dtype": options.dtype, "options": facts}
    runs = []
    for variant, engine in engines.items():
        if not roofline:
            runs.append(summarize(variant, work, kept[variant], **about))
            continue
        shape: dict[str, Any] = {
            "config": engine.runner.model.config,
            "top": ceilings(options.device, options.dtype),
            "batch": min(len(work.items), engine.scheduler.rows.count),
        }
        runs.append(summarize_generation(variant, work, kept[variant], **shape, **about))
    return runs


draw_beside_peers = figure(
    Panel(
        "{model}, {workload}",
        where={"workload": (*PUBLISHED, "single*", "decode*", "prompt*"), "neighbours": ""},
        peers=True,
    ),
    Panel("{model}, {workload}, beside a busy program", where={"neighbours": "?*"}),
    each=("model", "workload"),
    rows=2,
    height=3.8,
)
"""A panel of bars for each model and workload, with the best of each other engine."""
