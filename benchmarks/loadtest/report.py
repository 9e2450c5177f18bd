"""From outcomes to numbers: percentiles of first tokens, gaps and whole requests, throughput, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.loadtest.user import Outcome
from benchmarks.measure import percentiles


@dataclass(frozen=True)
class Goal:
    """What a good request keeps, in milliseconds: its first token, and the 99th percentile of its gaps."""

    first_ms: float = 2000.0
    gap_ms: float = 100.0


def summarize(outcomes: Sequence[Outcome], goal: Goal | None = None) -> dict[str, float]:
    """Metrics by name, in milliseconds and seconds; those of requests count only what was answered.

    An event may hold several tokens when the reader was slow. Gaps are those between events.
    """
    goal = goal or Goal()
    good = [outcome for outcome in outcomes if outcome.ok and outcome.times]
    found = {"requests": float(len(outcomes)), "failed": float(len(outcomes) - len(good))}
    if not good:
        return found
    seconds = max(o.ended for o in good) - min(o.started for o in good)
    tokens = sum(outcome.tokens for outcome in good)
    firsts = [(o.times[0] - o.started) * 1e3 for o in good]
    gaps = [np.diff(o.times) * 1e3 for o in good]
    wholes = [(o.ended - o.started) * 1e3 for o in good]
    found |= {
        "seconds": seconds,
        "output_tokens": float(tokens),
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(good) / seconds,
    }
    for name, values in (
        ("ttft_ms", firsts),
        ("itl_ms", [*np.concatenate(gaps)]),
        ("e2e_ms", wholes),
    ):
        found |= percentiles(name, values)
    kept = sum(
        first <= goal.first_ms
        and (not len(mine) or float(np.percentile(mine, 99)) <= goal.gap_ms)
        for first, mine in zip(firsts, gaps, strict=True)
    )
    found["goodput_requests_per_s"] = kept / seconds
    return found
