"""Metrics in Prometheus' text format, under vLLM's names where vLLM has one and under `ladder:` where not.

Names are those of https://docs.vllm.ai/en/latest/usage/metrics/, so that its dashboards work. The format:
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from serving.messages import StepReport, StepStats

if TYPE_CHECKING:
    from serving.completion import ChoiceGroup


class Metrics:
    """Everything that is counted in the API process.

    model: the name that is served, a label of every line.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.generated = self.prompted = 0
        self.finished: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a token that has come so long after the request, or after the token before it."""
        self.generated += 1

    def stepped(self, step: StepReport) -> None:
        """Look at a step of the engine."""

    def ended(self, group: ChoiceGroup) -> None:
        """Count a request that is over."""
        if group.trouble is not None:
            self.troubles[group.trouble[0]] += 1
        self.finished.update(choice.reason for choice in group.choices if choice.reason is not None)
        if group.computed:
            self.prompted += group.prompt_tokens

    def histograms(self, label: str) -> list[str]:
        """Return the lines of what has a distribution; the appendix counts it."""
        return []

    def text(self, stats: StepStats, *, blocks: int, in_flight: int, restarts: int, ready: bool) -> str:
        """Return the page that Prometheus reads."""
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
        }
        label = f'model_name="{_escape(self.model)}"'
        lines: list[str] = []
        for kind, group in (("gauge", gauges), ("counter", counters)):
            for name, (value, what) in group.items():
                lines += [*head(name, kind, what), f"{name}{{{label}}} {number(value)}"]
        lines += self.histograms(label)
        lines += head("vllm:request_success_total", "counter", "Completions that ended, by reason.")
        for reason in sorted({"stop", "length", *self.finished}):
            count = self.finished[reason]
            lines.append(f'vllm:request_success_total{{{label},finished_reason="{_escape(reason)}"}} {count}')
        lines += head(
            "ladder:troubles_total", "counter", "Requests that could not be answered in full, and why."
        )
        for reason, count in sorted(self.troubles.items()):
            lines.append(f'ladder:troubles_total{{{label},reason="{_escape(reason)}"}} {count}')
        lines += head("ladder:http_responses_total", "counter", "Answers by route and status.")
        for (route, status), count in sorted(self.answers.items()):
            lines.append(
                f'ladder:http_responses_total{{{label},route="{_escape(route)}",status="{status}"}} {count}'
            )
        return "\n".join(lines) + "\n"


def head(name: str, kind: str, what: str) -> list[str]:
    """Return the lines that say what a metric is."""
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def number(value: float) -> str:
    """Return a number as Prometheus reads it."""
    return str(value) if isinstance(value, int) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
