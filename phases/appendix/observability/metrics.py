"""Metrics of the API process: counters, and histograms of which a token costs a look-up in thirty buckets.

Their page has vLLM's names where vLLM has one, so that its dashboards work, and `ladder:` where not:
https://docs.vllm.ai/en/latest/usage/metrics/. The format is Prometheus':
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from serving.app import App
from serving.completion import ChoiceGroup
from serving.http.request import HttpRequest
from serving.messages import Ready, StepReport

TIMES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """A Prometheus histogram: counts of values by bucket, and their sum.

    bounds: upper ends of the buckets, ascending; values above the last have one more bucket.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value to its bucket and to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the histogram's lines in Prometheus' text format, in which buckets are cumulative.

        name: of the metric. labels: such as `model="x"`.
        """
        total = 0
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """The counters and histograms of the API process, and the route `/metrics` that shows them."""

    def __init__(self) -> None:
        self.generated = self.prompted = self.lost_log_lines = 0
        self.finished: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.first = Histogram(TIMES)
        self.gap = Histogram(TIMES)
        self.whole = Histogram(TIMES)
        self.prompt, self.output = Histogram(SIZES), Histogram(SIZES)
        self._last: dict[int, float] = {}  # number of a completion -> time of its newest token

    def install(self, app: App) -> None:
        """Add the route `/metrics` to a server, and observe its steps and the ends of its requests."""
        self.app = app
        app.engine.on_step.append(self.stepped)
        app.on_end.append(self.ended)
        app.routes["/metrics"] = {"GET": self.page}

    def stepped(self, step: StepReport) -> None:
        """Count a step's tokens, and add the seconds since each completion's token before to a histogram."""
        now, last = self.app.engine.now, self._last
        self.generated += len(step.tokens)
        for number in step.numbers:
            if number in last:
                self.gap.observe(now - last[number])
            last[number] = now
        for end in step.ends:
            last.pop(end.number, None)

    def ended(self, http: HttpRequest) -> None:
        """Count a request that has ended: status, finish reasons or failure, numbers of tokens, and
        times.
        """
        self.responses[
            http.path if http.path in self.app.routes else "other", http.status
        ] += 1
        group = http.group
        if group is None:
            return
        for choice in group.choices:  # one whose engine has died has no end
            self._last.pop(choice.number, None)
            if choice.reason is not None:
                self.finished[choice.reason] += 1
        failure = group.failure[0] if group.failure is not None else None
        if failure is not None:
            self.failures[failure] += 1
        if failure == "refused":  # no tokens of it were counted
            return
        self.prompted += group.prompt_tokens
        first = first_token(group)
        if first is not None:
            self.first.observe(first - http.started)
        self.prompt.observe(group.prompt_tokens)
        self.output.observe(group.output_tokens)
        self.whole.observe(time.perf_counter() - http.started)

    async def page(self, http: HttpRequest) -> None:
        """Respond to an HTTP request with every metric in Prometheus' text format."""
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await http.answer(200, ("\n".join(self.lines()) + "\n").encode(), [kind])

    def lines(self) -> Iterator[str]:
        """Yield the lines of `/metrics`, in Prometheus' text format: gauges, counters, histograms, labelled
        counters.
        """
        engine, ready = self.app.engine, self.app.engine.ready or Ready(0, 0)
        stats, model = engine.stats, f'model_name="{_escape(self.app.model.name)}"'
        used = 1.0 - stats.free_blocks / ready.blocks if ready.blocks else 0.0
        waiting, takes = (
            max(0, engine.in_flight - stats.running),
            int(self.app.state == "ready"),
        )
        values: dict[str, tuple[float, str]] = {
            "vllm:num_requests_running": (stats.running, "Completions that run."),
            "vllm:num_requests_waiting": (waiting, "Completions in line."),
            "vllm:kv_cache_usage_perc": (used, "Share of the cache's blocks in use, 0 to 1."),
            "ladder:free_blocks": (
                stats.free_blocks,
                "Blocks that can be had; cached ones count.",
            ),
            "ladder:blocks": (ready.blocks, "Blocks of the cache."),
            "ladder:ready": (takes, "Whether requests are taken."),
            "vllm:num_preemptions_total": (
                stats.preemptions,
                "Completions sent back in line.",
            ),
            "vllm:prompt_tokens_total": (self.prompted, "Tokens of prompts."),
            "vllm:generation_tokens_total": (self.generated, "Tokens generated."),
            "vllm:prefix_cache_queries_total": (
                stats.lookup_tokens,
                "Tokens looked up in the prefix cache.",
            ),
            "vllm:prefix_cache_hits_total": (stats.hit_tokens, "Tokens found there."),
            "ladder:steps_total": (stats.steps, "Steps of the engine."),
            "ladder:computed_tokens_total": (
                stats.computed_tokens,
                "Tokens that steps computed.",
            ),
            "ladder:engine_restarts_total": (
                engine.restarts,
                "Times that the engine was started again.",
            ),
            "ladder:lost_log_lines_total": (
                self.lost_log_lines,
                "Lines that the access log lost.",
            ),
        }
        for name, (value, what) in values.items():
            yield from _samples(name, what, {model: value})
        for name, histogram, what in (
            ("vllm:time_to_first_token_seconds", self.first, "From request to first token."),
            (
                "vllm:inter_token_latency_seconds",
                self.gap,
                "Between two tokens of a completion.",
            ),
            ("vllm:e2e_request_latency_seconds", self.whole, "From request to end."),
            ("vllm:request_prompt_tokens", self.prompt, "Tokens of a request's prompts."),
            ("vllm:request_generation_tokens", self.output, "Tokens generated for a request."),
        ):
            yield from (*_head(name, "histogram", what), *histogram.lines(name, model))
        ended = {
            f'{model},finished_reason="{_escape(why)}"': self.finished[why]
            for why in {"stop", "length", *self.finished}
        }
        failures = {
            f'{model},reason="{_escape(why)}"': count for why, count in self.failures.items()
        }
        responses = {
            f'{model},route="{_escape(path)}",status="{code}"': count
            for (path, code), count in self.responses.items()
        }
        tables: dict[str, tuple[Mapping[str, int], str]] = {
            "vllm:request_success_total": (ended, "Completions that ended, by reason."),
            "ladder:troubles_total": (
                failures,
                "Requests that could not be answered in full, and why.",
            ),
            "ladder:http_responses_total": (responses, "Responses by route and status."),
        }
        for name, (table, what) in tables.items():
            yield from _samples(name, what, table)


def first_token(group: ChoiceGroup) -> float | None:
    """Return the time at which the first token of any completion of a group came; None: none did."""
    return min((choice.times[0] for choice in group.choices if choice.times), default=None)


def _samples(name: str, what: str, samples: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of a gauge or a counter (whose name ends with `_total`): help, type, and its samples.

    what: the help text. samples: values by their labels, such as `model="x"`.
    """
    yield from _head(name, "counter" if name.endswith("_total") else "gauge", what)
    for labels, value in sorted(samples.items()):
        yield f"{name}{{{labels}}} {value}"


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    """Return a metric's HELP and TYPE lines. kind: counter, gauge or histogram. what: the help text."""
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
