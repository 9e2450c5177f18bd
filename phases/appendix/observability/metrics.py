"""Distributions beside the phase's counts: buckets of times and sizes, under vLLM's names.

A token costs one look-up in a list of twenty buckets.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from serving.completion import ChoiceGroup
from serving.messages import StepReport
from serving.metrics import Metrics, head, number

FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
GAP = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 10.0),
)
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values by bucket. bounds: upper ends, ascending; above the last is one more bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Its lines: buckets are cumulative."""
        total = 0
        for bound, count in zip([*map(number, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class WholeMetrics(Metrics):
    """Counts, and histograms of what a request waited for."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.first, self.gap = Histogram(FIRST), Histogram(GAP)
        self.whole, self.prompt, self.output = Histogram(WHOLE), Histogram(TOKENS), Histogram(TOKENS)
        self.step, self.step_tokens = Histogram(STEP), Histogram(TOKENS)
        self.lost_log_lines = 0

    def token(self, seconds: float, *, first: bool) -> None:
        """See `Metrics`."""
        self.generated += 1
        (self.first if first else self.gap).observe(seconds)

    def stepped(self, step: StepReport) -> None:
        """See `Metrics`."""
        self.step.observe(step.stats.step_seconds)
        self.step_tokens.observe(step.stats.step_tokens)

    def ended(self, group: ChoiceGroup) -> None:
        """See `Metrics`."""
        super().ended(group)
        if group.computed:
            self.prompt.observe(group.prompt_tokens)
            self.output.observe(group.output_tokens)
            self.whole.observe(time.perf_counter() - group.arrived)

    def histograms(self, label: str) -> list[str]:
        """See `Metrics`."""
        name, what = "ladder:lost_log_lines_total", "Lines that the access log could not write."
        lines = [*head(name, "counter", what), f"{name}{{{label}}} {self.lost_log_lines}"]
        histograms = {
            "vllm:time_to_first_token_seconds": (self.first, "From request to first token."),
            "vllm:inter_token_latency_seconds": (self.gap, "Between two tokens of a completion."),
            "vllm:e2e_request_latency_seconds": (self.whole, "From request to end."),
            "vllm:request_prompt_tokens": (self.prompt, "Tokens of a request's prompts."),
            "vllm:request_generation_tokens": (self.output, "Tokens generated for a request."),
            "vllm:iteration_tokens_total": (self.step_tokens, "Tokens of a step."),
            "ladder:step_seconds": (self.step, "Duration of a step."),
        }
        for name, (histogram, what) in histograms.items():
            lines += [*head(name, "histogram", what), *histogram.lines(name, label)]
        return lines
