"""Workloads that other engines publish, the sizes of engines that serve them, and bars beside the peers'."""

from __future__ import annotations

from typing import Any

from benchmarks.plotting import Panel, figure

SIZES: dict[str, Any] = {"max_rows": 256, "max_len": 4096, "step_tokens": 16_384}
"""Of engines that serve these workloads."""
PUBLISHED = ("single-512", "offline-256", "prefill-64x1024")


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
