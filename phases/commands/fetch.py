"""`ladder fetch`: download a model, with a bar while it takes."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from common.console import err, out
from common.models.hub import fetch


def fetch_with_progress(model: str, *, contents: bool = False) -> Path:
    """Like `common.models.hub.fetch`, with a bar; the hub's library shows bars of its own."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err)

    def report(stage: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()  # only now: an idle bar would leave an empty line
        if stage not in tasks:
            tasks[stage] = bar.add_task(f"{model}: {stage}")
        bar.update(tasks[stage], completed=done, total=total or None)

    try:
        return fetch(model, report, lambda line: err.print(line, markup=False), contents=contents)
    finally:
        if tasks:
            bar.stop()


def run(model: str) -> int:
    """Fetch a model, or see whether what is there is whole; then say where it is."""
    folder = fetch_with_progress(model, contents=True)
    out.out(str(folder), highlight=False)
    return 0
