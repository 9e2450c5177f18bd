"""A bar on standard error for what takes seconds, where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.console import err


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` parts. Call what it gives before each part, with a word for it.

    Nothing is shown unless standard error is a terminal.
    """
    columns = (
        TextColumn(title),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task("", total=total)
        begun = False

        def part(name: str) -> None:
            nonlocal begun
            shown.update(task, description=name, advance=int(begun))
            begun = True

        yield part
