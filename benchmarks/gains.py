"""What a phase gained over the one before it, read from its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.evidence import APPENDIX, Evidence, Run
from benchmarks.labels import axis_label
from phases import PHASES, Phase

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
    19: Headline(
        "ttft_ms_p50", runs={"workload": "restart-2000"}, before=("08_prefix_cache",)
    ),
}
"""By the number of the phase; other phases have the default."""


def headline_of(phase: Phase) -> Headline:
    """What a phase's gain is read from."""
    return HEADLINES.get(phase.number, Headline())


@dataclass(frozen=True)
class Gain:
    """One comparison: the factor, always above 1 for better, and what was compared."""

    factor: float
    metric: str
    before: Run
    after: Run
    appendix: bool = False
    """Whether the engine has features of the appendix."""


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
                        return Gain(
                            _factor(head.metric, before, after),
                            head.metric,
                            before,
                            after,
                            hides_appendix(phase, evidence)
                            or after.variant.endswith(APPENDIX),
                        )
    return None


def hides_appendix(phase: Phase, evidence: Evidence) -> bool:
    """Return True if a file's names do not say that its engines have the appendix: all of them have, or the
    file is older than such names, and of a phase whose engines came with it.
    """
    older = not evidence.appendix and phase.number >= FIRST_WITH_APPENDIX
    return older or evidence.appendix == "all"


def is_level(found: Gain) -> bool:
    """Return True if a gain is one in name only: the samples before and after overlap."""
    before = found.before.metrics[found.metric].samples
    after = found.after.metrics[found.metric].samples
    apart = min(after) > max(before) or max(after) < min(before)
    return found.factor > 1 and not apart


def factor_text(found: Gain | None) -> str:
    """`5.3×`, `level` where samples of both overlap, or nothing without a comparison.

    What an engine with the appendix makes is named so.
    """
    if found is None:
        return ""
    factor = f"{found.factor:.2g}×" if found.factor < 100 else f"{found.factor:,.0f}×"
    return ("level" if is_level(found) else factor) + " with the appendix" * found.appendix


def gain_words(metric: str) -> str:
    """What more of is better: `output tokens per second`, `less time to first token, p50`."""
    words = axis_label(metric).removesuffix(" (ms)").removesuffix(" (GB)")
    return f"{'less ' if _less_is_better(metric) else ''}{words}"


def _same_work(one: Run, other: Run, own: Mapping[str, object]) -> bool:
    def facts(run: Run) -> tuple[object, ...]:
        options = sorted(
            (name, value) for name, value in run.options.items() if name not in own
        )
        return run.workload_sha256, run.model, run.weights, run.dtype, options

    return facts(one) == facts(other)


def _less_is_better(metric: str) -> bool:
    return (
        "_ms_" in metric or metric.endswith(("_bytes", "_us_per_step")) or metric == "seconds"
    )


def _factor(metric: str, before: Run, after: Run) -> float:
    old, new = before.median(metric), after.median(metric)
    top, bottom = (old, new) if _less_is_better(metric) else (new, old)
    return top / bottom if bottom else float("inf")
