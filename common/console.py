"""The commands' two output streams: results go to standard output, messages to standard error."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def table(*left: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table (of rich) that draws no lines.

    left: titles of columns of words, which are folded where there is no room.
    right: titles of the columns of numbers, to their right, which stay whole.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        made.add_column(title, overflow="fold")
    for title in right:
        made.add_column(title, justify="right", no_wrap=True)
    return made


out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
