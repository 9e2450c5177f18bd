"""The page of a server's metrics, under vLLM's names where vLLM has one and under `ladder:` where not.

Names are those of https://docs.vllm.ai/en/latest/usage/metrics/, so that its dashboards work. The format is
Prometheus': https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from serving.http.request import HttpRequest
from serving.messages import Ready

if TYPE_CHECKING:
    from phases.appendix.observability.metrics import Histogram, Metrics


async def page(metrics: Metrics, http: HttpRequest) -> None:
    """Respond to an HTTP request with all `metrics` in Prometheus' text format."""
    kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
    await http.answer(200, ("\n".join(lines(metrics)) + "\n").encode(), [kind])


def lines(metrics: Metrics) -> Iterator[str]:
    """Yield the lines of `/metrics` in Prometheus' text format.

    They are gauges and counters of one value, histograms, and then counters with several labels.
    """
    engine, ready = metrics.app.engine, metrics.app.engine.ready or Ready(0, 0)
    stats, model = engine.stats, f'model_name="{_escape(metrics.app.model.name)}"'
    used = 1.0 - stats.free_blocks / ready.blocks if ready.blocks else 0.0
    waiting, takes = (
        max(0, engine.in_flight - stats.running),
        int(metrics.app.state == "ready"),
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
        "vllm:prompt_tokens_total": (metrics.prompted, "Tokens of prompts."),
        "vllm:generation_tokens_total": (metrics.generated, "Tokens generated."),
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
            metrics.lost_log_lines,
            "Lines that the access log lost.",
        ),
    }
    for name, (value, what) in values.items():
        yield from _samples(name, what, {model: value})
    for name, histogram, what in (
        ("vllm:time_to_first_token_seconds", metrics.first, "From request to first token."),
        (
            "vllm:inter_token_latency_seconds",
            metrics.gap,
            "Between two tokens of a completion.",
        ),
        ("vllm:e2e_request_latency_seconds", metrics.whole, "From request to end."),
        ("vllm:request_prompt_tokens", metrics.prompt, "Tokens of a request's prompts."),
        ("vllm:request_generation_tokens", metrics.output, "Tokens generated for a request."),
    ):
        yield from (*_head(name, "histogram", what), *histogram_lines(histogram, name, model))
    ended = {
        f'{model},finished_reason="{_escape(why)}"': metrics.finished[why]
        for why in {"stop", "length", *metrics.finished}
    }
    failures = {
        f'{model},reason="{_escape(why)}"': count for why, count in metrics.failures.items()
    }
    responses = {
        f'{model},route="{_escape(path)}",status="{code}"': count
        for (path, code), count in metrics.responses.items()
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


def histogram_lines(histogram: Histogram, name: str, labels: str) -> Iterator[str]:
    """Yield a histogram's lines in Prometheus' text format, in which buckets are cumulative.

    name: of the metric. labels: such as `model="x"`.
    """
    total = 0
    for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
        total += count
        yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
    yield f"{name}_sum{{{labels}}} {histogram.sum!r}"
    yield f"{name}_count{{{labels}}} {total}"


def _samples(name: str, what: str, samples: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of a gauge or a counter: its HELP and TYPE, and a line for each sample.

    name: of the metric; that of a counter ends with `_total`. what: the help text. samples: values by their
        labels, such as `model="x"`.
    """
    yield from _head(name, "counter" if name.endswith("_total") else "gauge", what)
    for labels, value in sorted(samples.items()):
        yield f"{name}{{{labels}}} {value}"


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    """Return a metric's HELP and TYPE lines.

    name: of the metric. kind: counter, gauge or histogram. what: the help text.
    """
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
