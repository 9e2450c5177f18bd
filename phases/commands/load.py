"""`ladder load`: ask a server from many users, and say what they had to wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from benchmarks.loadtest.loops import Plan, poisson
from benchmarks.loadtest.loops import run as ask_all
from benchmarks.loadtest.report import Goal, summarize
from benchmarks.loadtest.user import Outcome, Target
from benchmarks.server import bodies_of
from benchmarks.workloads import Workload, workload
from common import words
from common.console import err, out
from common.errors import UserError, integer, number
from common.files import whole

QUIET = 10.0
COLUMNS = {
    "output_tokens_per_s": "tokens\na second",
    "goodput_requests_per_s": "good\na second",
    "ttft_ms_p50": "first\np50 ms",
    "ttft_ms_p99": "first\np99 ms",
    "itl_ms_p50": "gap\np50 ms",
    "itl_ms_p99": "gap\np99 ms",
    "e2e_ms_p50": "whole\np50 ms",
    "failed": "\nfailed",
}
"""Two lines each: all of them fit 80 columns. Good: requests that keep the goal."""


def run(
    url: str,
    *,
    users: str | None,
    rate: float | None,
    name: str,
    requests: int | None,
    vocab: int,
    processes: int,
    key: str,
    first_ms: float,
    gap_ms: float,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    """Ask and print; returns 1 if a request failed.

    users: numbers with commas, each a closed loop of its own; or
    rate: requests a second of an open loop. Neither: the workload's own arrivals.
    """
    work = workload(name, integer("vocab", vocab, low=2, high=1 << 31))
    goal = Goal(number("first_ms", first_ms, low=0, high=1e9), number("gap_ms", gap_ms, low=0, high=1e9))
    integer("processes", processes, low=1, high=64)
    target = Target.of(url, key)
    rows: list[dict[str, Any]] = []
    for label, plan in plans(work, users, rate, requests):
        with Watch(rows, label, plan, goal) as watch:
            outcomes = ask_all(target, plan, processes, watch)
            found: dict[str, Any] = {"load": label, "workload": name, **summarize(outcomes, goal)}
            errors = sorted({outcome.error for outcome in outcomes if outcome.error})
            rows.append(found | ({"errors": errors[:5]} if errors else {}))
    out.print(table(rows))
    for row in rows:
        for error in row.get("errors", ()):
            err.print(f"error: {_plain(error)}", markup=False, soft_wrap=True)
    if json_path is not None:
        with whole(json_path) as scratch:
            scratch.write_text(json.dumps({"url": url, "sha256": work.sha256, "runs": rows}, indent=1) + "\n")
    if plot_path is not None:
        plot(rows, plot_path)
    return int(any(row["failed"] for row in rows))


def plans(
    work: Workload, users: str | None, rate: float | None, requests: int | None
) -> list[tuple[str, Plan]]:
    """Return the plans of requests, with a label for each. Raises `UserError`."""
    if users is not None and rate is not None:
        raise UserError("--users and --rate are both given, but only one of them can be")
    bodies = bodies_of(work)
    if users is not None:
        found = []
        for text in users.split(","):
            count = integer("users", int(text) if text.strip().isdecimal() else text, low=1, high=65_536)  # type: ignore[arg-type]
            total = requests or max(len(bodies), 2 * count)
            found.append((words.count(count, "user"), Plan(bodies, total, users=count)))
        return found
    total = requests or len(bodies)
    if rate is not None:
        number("rate", rate, low=0.0, high=1e6, above_low=True)
        return [(f"{rate:g} a second", Plan(_repeated(bodies, total), total, arrivals=poisson(rate, total)))]
    if total > len(bodies):
        raise UserError(f"--requests is {total}, but {work.name} has {len(bodies)} arrivals; give --rate")
    return [(work.name, Plan(bodies[:total], total, arrivals=work.arrivals[:total]))]


def _repeated(bodies: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [bodies[number % len(bodies)] for number in range(count)]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a load."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("\nload", overflow="fold")
    for title in COLUMNS.values():
        made.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        values = [row.get(name) for name in COLUMNS]
        made.add_row(row["load"], *("" if value is None else _number(value) for value in values))
    return made


def _number(value: float) -> str:
    """Three digits and a point at most: 8,142 and 42.1 and 0.52."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def _plain(error: str) -> str:
    """A failure of a connection in words; what a server has said stays as it is."""
    name, _, reason = error.partition(": ")
    said = {
        "ConnectionRefusedError": "the server takes no connections any more",
        "ConnectionResetError": "the server has cut a connection",
        "TimeoutError": "the server has not answered in time",
    }.get(name)
    return f"{said} ({reason or name})" if said else error


class Watch:
    """The progress of requests: a table on a screen, elsewhere a line every `QUIET` seconds."""

    def __init__(self, rows: Sequence[dict[str, Any]], label: str, plan: Plan, goal: Goal) -> None:
        self.rows, self.label, self.plan, self.goal = rows, label, plan, goal
        self.outcomes: list[Outcome] = []
        self.said = time.monotonic()
        self._live = Live(
            console=err, get_renderable=self._shown, refresh_per_second=4, transient=True, auto_refresh=True
        )

    def __enter__(self) -> Watch:
        if err.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if err.is_terminal:
            self._live.stop()

    def __call__(self, outcome: Outcome) -> None:
        """Take what became of a request."""
        self.outcomes.append(outcome)
        if not err.is_terminal and time.monotonic() - self.said > QUIET:
            self.said = time.monotonic()
            err.print(f"[dim]{self._label()}[/dim]")

    def _label(self) -> str:
        return f"{self.label}: {len(self.outcomes):,} of {self.plan.requests:,} answered"

    def _shown(self) -> RenderableType:
        """The table as it is now, and how far this load is: clients take seconds to start."""
        now = {"load": self.label, **summarize(self.outcomes, self.goal)} if self.outcomes else None
        rows = [*self.rows, now] if now else self.rows
        return Group(table(rows), self._label()) if rows else self._label()


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """First tokens and gaps of every load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, name, title in zip(panels, ("ttft_ms", "itl_ms"), ("first token", "gap"), strict=True):
        for place, percentile in enumerate((50, 95, 99)):
            values = [row.get(f"{name}_p{percentile}", 0.0) for row in rows]
            at = [number + 0.25 * place for number in range(len(rows))]
            axes.bar(at, values, 0.24, label=f"p{percentile}")
        axes.set_xticks([number + 0.25 for number in range(len(rows))], [row["load"] for row in rows])
        axes.set_ylabel(f"{title} (ms)")
        axes.legend()
    with whole(path) as scratch:
        figure.savefig(scratch)
    pyplot.close(figure)
