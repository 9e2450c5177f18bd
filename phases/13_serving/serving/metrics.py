"""Metrics in Prometheus' text format, under vLLM's names where vLLM has one and under `ladder:` where not.

Names and buckets are those of https://docs.vllm.ai/en/latest/usage/metrics/, so that its dashboards work. A
token costs one look-up in a list of twenty buckets. The format:
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from serving.messages import StepReport, StepStats

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
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Everything that is counted in the API process.

    model: the name that is served, a label of every line.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.first, self.gap = Histogram(FIRST), Histogram(GAP)
        self.whole, self.prompt, self.output = Histogram(WHOLE), Histogram(TOKENS), Histogram(TOKENS)
        self.step, self.step_tokens = Histogram(STEP), Histogram(TOKENS)
        self.generated = self.prompted = 0
        self.finished: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.lost_log_lines = 0

    def token(self, seconds: float, *, first: bool) -> None:
        """A token has come, so long after the request or after the token before it."""
        self.generated += 1
        (self.first if first else self.gap).observe(seconds)

    def stepped(self, step: StepReport) -> None:
        """The engine has run a step."""
        self.step.observe(step.stats.step_seconds)
        self.step_tokens.observe(step.stats.step_tokens)

    def text(self, stats: StepStats, *, blocks: int, in_flight: int, restarts: int, ready: bool) -> str:
        """The page that Prometheus reads."""
        used = 1.0 - stats.free_blocks / blocks if blocks else 0.0
        gauges = {
            "vllm:num_requests_running": (stats.running, "Completions that run."),
            "vllm:num_requests_waiting": (max(0, in_flight - stats.running), "Completions in line."),
            "vllm:kv_cache_usage_perc": (used, "Share of the cache's blocks in use, 0 to 1."),
            "ladder:free_blocks": (stats.free_blocks, "Blocks that can be had; cached ones count."),
            "ladder:blocks": (blocks, "Blocks of the cache."),
            "ladder:ready": (int(ready), "Whether requests are taken."),
        }
        counters = {
            "vllm:num_preemptions_total": (stats.preemptions, "Completions sent back in line."),
            "vllm:prompt_tokens_total": (self.prompted, "Tokens of prompts."),
            "vllm:generation_tokens_total": (self.generated, "Tokens generated."),
            "vllm:prefix_cache_queries_total": (stats.lookup_tokens, "Tokens looked up in the prefix cache."),
            "vllm:prefix_cache_hits_total": (stats.hit_tokens, "Tokens found there."),
            "ladder:steps_total": (stats.steps, "Steps of the engine."),
            "ladder:computed_tokens_total": (stats.computed_tokens, "Tokens that steps computed."),
            "ladder:engine_restarts_total": (restarts, "Times that the engine had to be started again."),
            "ladder:lost_log_lines_total": (
                self.lost_log_lines,
                "Lines that the access log could not write.",
            ),
        }
        histograms = {
            "vllm:time_to_first_token_seconds": (self.first, "From request to first token."),
            "vllm:inter_token_latency_seconds": (self.gap, "Between two tokens of a completion."),
            "vllm:e2e_request_latency_seconds": (self.whole, "From request to end."),
            "vllm:request_prompt_tokens": (self.prompt, "Tokens of a request's prompts."),
            "vllm:request_generation_tokens": (self.output, "Tokens generated for a request."),
            "vllm:iteration_tokens_total": (self.step_tokens, "Tokens of a step."),
            "ladder:step_seconds": (self.step, "Duration of a step."),
        }
        label = f'model_name="{_escape(self.model)}"'
        lines: list[str] = []
        for kind, group in (("gauge", gauges), ("counter", counters)):
            for name, (value, what) in group.items():
                lines += [*_head(name, kind, what), f"{name}{{{label}}} {_number(value)}"]
        for name, (histogram, what) in histograms.items():
            lines += [*_head(name, "histogram", what), *histogram.lines(name, label)]
        lines += _head("vllm:request_success_total", "counter", "Completions that ended, by reason.")
        for reason in sorted({"stop", "length", *self.finished}):
            count = self.finished[reason]
            lines.append(f'vllm:request_success_total{{{label},finished_reason="{_escape(reason)}"}} {count}')
        lines += _head(
            "ladder:troubles_total", "counter", "Requests that could not be answered in full, and why."
        )
        for reason, count in sorted(self.troubles.items()):
            lines.append(f'ladder:troubles_total{{{label},reason="{_escape(reason)}"}} {count}')
        lines += _head("ladder:http_responses_total", "counter", "Answers by route and status.")
        for (route, status), count in sorted(self.answers.items()):
            lines.append(
                f'ladder:http_responses_total{{{label},route="{_escape(route)}",status="{status}"}} {count}'
            )
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
