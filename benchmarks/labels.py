"""Words for a metric's name: on an axis, in a table, on the command line. Needs no matplotlib."""

from __future__ import annotations

LABELS = {
    "output_tokens_per_s": "output tokens per second",
    "prompt_tokens_per_s": "prompt tokens per second",
    "peak_memory_bytes": "peak memory (GB)",
    "kv_cache_bytes": "KV cache (GB)",
    "memory_grown_bytes": "memory grown (GB)",
    "requests_in_flight": "requests in flight",
    "bandwidth_fraction": "share of the read bandwidth",
    "flop_fraction": "share of the matmul ceiling",
    "cache_hit_fraction": "share of prompt tokens found in the cache",
    "acceptance_fraction": "share of drafts accepted",
}


def metric_of(work: str) -> str:
    """Return what a workload is about: prompts, or what is made of them."""
    return (
        "prompt_tokens_per_s"
        if work.startswith(("prefill", "prompt-1x"))
        else "output_tokens_per_s"
    )


def scale_of(metric: str) -> float:
    """Return what a metric is multiplied by to be in its label's unit: bytes are shown as gigabytes."""
    return 1e-9 if metric.endswith("_bytes") else 1.0


def axis_label(metric: str) -> str:
    """Name a metric as an axis does."""
    if metric in LABELS:
        return LABELS[metric]
    name, _, tail = metric.partition("_ms_")
    words = {
        "ttft": "time to first token",
        "itl": "inter-token latency",
        "e2e": "end-to-end latency",
    }
    return (
        f"{words.get(name, name.replace('_', ' '))}, {tail} (ms)"
        if tail
        else metric.replace("_", " ")
    )


def number(value: float) -> str:
    """A number as people read it: 1,234 and 56.7 and 0.089."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"
