"""`ladder load`: ask a server from many users, and say what they had to wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from benchmarks.loadtest.loops import Plan, poisson
from benchmarks.loadtest.loops import run as ask_all
from benchmarks.loadtest.report import Goal, summarize
from benchmarks.loadtest.user import Outcome, Target
from benchmarks.server import bodies_of
from benchmarks.workloads import Workload, workload
from common.console import err, out
from common.errors import UserError, integer, number
from common.files import whole

COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "goodput_requests_per_s": "goodput/s",
    "ttft_ms_p50": "first p50",
    "ttft_ms_p99": "p99 (ms)",
    "itl_ms_p50": "gap p50",
    "itl_ms_p99": "p99 (ms)",
    "e2e_ms_p50": "whole p50",
    "failed": "failed",
}


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
    with Live(console=err, refresh_per_second=4, transient=True) as live:
        for label, plan in plans(work, users, rate, requests):
            watch = _watch(live, rows, label, plan, goal)
            outcomes = ask_all(target, plan, processes, watch)
            found: dict[str, Any] = {"load": label, "workload": name, **summarize(outcomes, goal)}
            errors = sorted({outcome.error for outcome in outcomes if outcome.error})
            rows.append(found | ({"errors": errors[:5]} if errors else {}))
    out.print(table(rows))
    for row in rows:
        for error in row.get("errors", ()):
            err.print(f"error: {error}", markup=False)
    if json_path is not None:
        with whole(json_path) as scratch:
            scratch.write_text(json.dumps({"url": url, "sha256": work.sha256, "runs": rows}, indent=1) + "\n")
    if plot_path is not None:
        plot(rows, plot_path)
    return int(any(row["failed"] for row in rows))


def plans(
    work: Workload, users: str | None, rate: float | None, requests: int | None
) -> list[tuple[str, Plan]]:
    """What to send, with a label for each. Raises `UserError`."""
    if users is not None and rate is not None:
        raise UserError("--users and --rate are both given, but only one of them can be")
    bodies = bodies_of(work)
    if users is not None:
        found = []
        for text in users.split(","):
            count = integer("users", int(text) if text.strip().isdecimal() else text, low=1, high=65_536)  # type: ignore[arg-type]
            total = requests or max(len(bodies), 2 * count)
            found.append((f"{count} users", Plan(bodies, total, users=count)))
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
    made = Table("load", box=None, pad_edge=False, header_style="bold")
    for title in COLUMNS.values():
        made.add_column(title, justify="right")
    for row in rows:
        values = [row.get(name) for name in COLUMNS]
        made.add_row(row["load"], *("" if value is None else f"{value:,.5g}" for value in values))
    return made


def _watch(
    live: Live, rows: list[dict[str, Any]], label: str, plan: Plan, goal: Goal
) -> Callable[[Outcome], None]:
    """Shows the table while it grows, four times a second."""
    outcomes: list[Outcome] = []
    shown = 0.0

    def progress(outcome: Outcome) -> None:
        nonlocal shown
        outcomes.append(outcome)
        if time.monotonic() - shown > 0.25:
            shown = time.monotonic()
            now = {"load": f"{label}: {len(outcomes)} of {plan.requests}", **summarize(outcomes, goal)}
            live.update(table([*rows, now]))

    return progress


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
