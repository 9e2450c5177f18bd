"""Metrics of the API process: counters, and histograms that add a token by a search in thirty buckets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial

from phases.appendix.observability.exposition import page
from serving.app import App
from serving.http.request import HttpRequest
from serving.messages import StepReport

TIMES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """A Prometheus histogram: counts of values by bucket, and their sum.

    bounds: upper ends of the buckets, ascending; values above the last are counted in one more bucket.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value to its bucket and to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """The counters and histograms of the server `app`, and its route `/metrics`, which shows them."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.generated = self.prompted = self.lost_log_lines = 0
        self.finished: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.first = Histogram(TIMES)
        self.gap = Histogram(TIMES)
        self.whole = Histogram(TIMES)
        self.prompt, self.output = Histogram(SIZES), Histogram(SIZES)
        self._last: dict[int, float] = {}  # number of a completion -> time of its newest token
        app.engine.on_step.append(self.stepped)
        app.on_end.append(self.ended)
        app.routes["/metrics"] = {"GET": partial(page, self)}

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
        """Count an ended HTTP request: status, finish reasons or failure, tokens, and times."""
        route = http.path if http.path in self.app.routes else "other"
        self.responses[route, http.status] += 1
        group = http.group
        if group is None:
            return
        firsts = list[float]()
        for number in group.numbers:  # one whose engine has died has no end
            self._last.pop(number, None)
        for choice in group.choices:
            firsts += choice.times[:1]
            if choice.reason is not None:
                self.finished[choice.reason] += 1
        if group.failure is not None:
            self.failures[group.failure[0]] += 1
            if group.failure[0] == "refused":  # no tokens of it were counted
                return
        self.prompted += group.prompt_tokens
        if firsts:
            self.first.observe(min(firsts) - http.started)
        self.prompt.observe(group.prompt_tokens)
        self.output.observe(group.output_tokens)
        self.whole.observe(time.perf_counter() - http.started)
