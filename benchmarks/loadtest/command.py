"""`ladder load`: ask a server from many users, and say what they had to wait for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from benchmarks.labels import number as say_number
from benchmarks.loadtest.loops import LoadPlan, poisson
from benchmarks.loadtest.loops import run as ask_all
from benchmarks.loadtest.report import Goal, summarize
from benchmarks.loadtest.user import Target
from benchmarks.server import bodies_of
from benchmarks.workloads import Workload
from benchmarks.workloads import workload as named
from common import words
from common.console import err, out, table
from common.errors import UserError, integer, number
from common.files import whole
from common.progress import bar

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


def run(given: SimpleNamespace) -> int:
    """Ask and print; returns 1 if a request failed.

    given: the arguments; `users` are numbers, each a closed loop of its own, and `rate` is
        requests a second of an open loop. Neither: the workload's own arrivals.
    """
    work = named(given.workload, integer("vocab", given.vocab, low=2, high=1 << 31))
    first, gap = (
        number(name, getattr(given, name), low=0, high=1e9) for name in ("first_ms", "gap_ms")
    )
    integer("processes", given.processes, low=1, high=64)
    target = Target.of(given.url, given.api_key)
    rows: list[dict[str, Any]] = []
    for label, plan in plans(work, given.users, given.rate, given.requests):
        with bar(label, plan.requests) as answered:
            outcomes = ask_all(target, plan, given.processes, lambda outcome: answered(""))
        found: dict[str, Any] = {
            "load": label,
            "workload": given.workload,
            **summarize(outcomes, Goal(first, gap)),
        }
        errors = sorted({outcome.error for outcome in outcomes if outcome.error})
        rows.append(found | ({"errors": errors[:5]} if errors else {}))
    out.print(shown(rows))
    for row in rows:
        for error in row.get("errors", ()):
            err.print(f"error: {error}", markup=False, soft_wrap=True)
    if given.json is not None:
        kept = {"url": given.url, "sha256": work.sha256, "runs": rows}
        with whole(given.json) as scratch:
            scratch.write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(row["failed"] for row in rows))


def plans(
    work: Workload, users: Sequence[str] | None, rate: float | None, requests: int | None
) -> list[tuple[str, LoadPlan]]:
    """Return the plans of requests, with a label for each. Raises `UserError`."""
    if users is not None and rate is not None:
        raise UserError("--users and --rate are both given, but only one of them can be")
    bodies = bodies_of(work)
    if users is not None:
        found = []
        for text in ",".join(users).split(","):
            number: Any = (
                int(text) if text.strip().isdecimal() else text
            )  # which `integer` refuses
            count = integer("users", number, low=1, high=65_536)
            total = requests or max(len(bodies), 2 * count)
            found.append((words.count(count, "user"), LoadPlan(bodies, total, users=count)))
        return found
    total = requests or len(bodies)
    if rate is not None:
        number("rate", rate, low=0.0, high=1e6, above_low=True)
        asked = list(islice(cycle(bodies), total))
        return [(f"{rate:g} a second", LoadPlan(asked, total, arrivals=poisson(rate, total)))]
    if total > len(bodies):
        raise UserError(
            f"--requests is {total}, but {work.name} has {len(bodies)} arrivals; give --rate"
        )
    return [(work.name, LoadPlan(bodies[:total], total, arrivals=work.arrivals[:total]))]


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a line for each load."""
    made = table("\nload", right=COLUMNS.values())
    for row in rows:
        values = [row.get(name) for name in COLUMNS]
        made.add_row(
            row["load"], *("" if value is None else say_number(value) for value in values)
        )
    return made
