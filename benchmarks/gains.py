"""What a phase gained over the one before it, read from its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from benchmarks.evidence import APPENDIX, Evidence, Run
from benchmarks.labels import axis_label
from phases import PHASES, Phase, find_phase

FIRST_WITH_APPENDIX = 9
"""The first phase whose benches loaded engines with the appendix's features, before names said so."""


@dataclass(frozen=True)
class Headline:
    """What a phase's gain over the phase before is read from.

    metric: whose gain is shown in tables. runs: options of the runs; empty: of all runs.
    variants: of the phase, the first that was measured; empty: the one with the phase's name.
    before: variants that it is compared with, the first that was measured; empty: the phase before.
    """

    metric: str = "output_tokens_per_s"
    runs: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


HEADLINES = {
    2: Headline(runs={"model": "qwen3-0.6b"}),
    3: Headline(runs={"model": "qwen3-0.6b"}),
    5: Headline("requests_in_flight"),
    7: Headline("itl_ms_p99", runs={"model": "qwen3-0.6b", "budget": 512}),
    8: Headline("ttft_ms_p50"),
    9: Headline(before=("08_prefix_cache, kernels of 06", "08_prefix_cache")),
    10: Headline(variants=("10_quant fp8", "10_quant int8")),
    13: Headline(before=("13_serving, phase 02 one at a time", "09_cuda_graphs, no server")),
    14: Headline(runs={"dtype": "bfloat16", "ranks": 2, "part": "offline"}),
    15: Headline(
        "cache_hit_fraction", runs={"route": "prefix"}, before=("13_serving, copies",)
    ),
    16: Headline(before=("dense of all weights", "dense of equal activity")),
    17: Headline("requests_in_flight", runs={"context": 8192}),
    19: Headline("ttft_ms_p50", runs={"workload": "restart-2000"}),
}
"""By the number of the phase; other phases have the default."""


def headline_of(phase: Phase) -> Headline:
    """What a phase's gain is read from."""
    return HEADLINES.get(phase.number, Headline())


@dataclass(frozen=True)
class Gain:
    """One comparison. appendix: the engine has features of the appendix."""

    metric: str
    before: Run
    after: Run
    appendix: bool


def gain(phase: Phase, evidence: Evidence | None) -> Gain | None:
    """The phase's headline: its metric in its runs against those of the highest phase below it.

    The first pair of runs of one workload, model, dtype and options counts, so a `bench.py` puts the
    comparison it is about first. `Headline.runs` narrows the choice down; an option that it names is
    this phase's own (a budget), and the runs before have none.
    """
    if evidence is None:
        return None
    names = [other.name for other in reversed(PHASES) if other.number < phase.number]
    head = headline_of(phase)
    wanted = head.runs if evidence.find(**head.runs) else {}
    for variant in head.variants or (phase.name,):
        for after in evidence.find(variant, **wanted):
            if head.metric not in after.metrics:
                continue
            for name in head.before or names:
                for before in evidence.find(name):
                    if head.metric in before.metrics and _same_work(before, after, wanted):
                        named = hides_appendix(evidence) or after.variant.endswith(APPENDIX)
                        return Gain(head.metric, before, after, named)
    return None


def hides_appendix(evidence: Evidence) -> bool:
    """Whether all engines have the appendix and no name says so, which is so in old files, too."""
    phase = find_phase(evidence.phase)
    older = phase is not None and phase.number >= FIRST_WITH_APPENDIX and not evidence.appendix
    return older or evidence.appendix == "all"


def factor_text(found: Gain | None) -> str:
    """`5.3×`, `level` where samples of both overlap, or nothing without a comparison.

    What an engine with the appendix makes is named so.
    """
    if found is None:
        return ""
    before, after = (run.metrics[found.metric] for run in (found.before, found.after))
    pair = (before, after) if _less_is_better(found.metric) else (after, before)
    top, bottom = (metric.median for metric in pair)
    factor = top / bottom if bottom else inf
    said = f"{factor:.2g}×" if factor < 100 else f"{factor:,.0f}×"
    apart = min(after.samples) > max(before.samples) or max(after.samples) < min(
        before.samples
    )
    if factor > 1 and not apart:
        said = "level"
    return said + " with the appendix" * found.appendix


def gain_words(metric: str) -> str:
    """What more of is better: `output tokens per second`, `less time to first token, p50`."""
    words = axis_label(metric).removesuffix(" (ms)").removesuffix(" (GB)")
    return f"{'less ' if _less_is_better(metric) else ''}{words}"


def _same_work(one: Run, other: Run, own: Mapping[str, object]) -> bool:
    def facts(run: Run) -> tuple[object, ...]:
        options = {name: value for name, value in run.options.items() if name not in own}
        return run.workload_sha256, run.model, run.weights, run.dtype, options

    return facts(one) == facts(other)


def _less_is_better(metric: str) -> bool:
    return (
        "_ms_" in metric or metric.endswith(("_bytes", "_us_per_step")) or metric == "seconds"
    )
