"""A bar on standard error for what takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

from common.console import err


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` parts. Call what it gives when a part begins, with a word for it.

    Nothing is shown unless standard error is a terminal.
    """
    with Progress(console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=total)
        yield lambda part: shown.update(task, description=f"{title} {part}", advance=1)
