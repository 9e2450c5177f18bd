"""A progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

from common.console import err


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of `total` parts while a `with` block runs.

    The block gets a function to call once for each part, with the part's label. Nothing is shown unless
    standard error is a terminal.
    """
    with Progress(console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda part: shown.update(task, description=f"{title} {part}", advance=1)
