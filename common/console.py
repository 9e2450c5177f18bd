"""The commands' two streams: results to standard output, everything about them to standard error."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table


class StandardError(io.TextIOBase):
    """Standard error as it is at the moment. What cannot be written there is lost: nothing depends on it."""

    @property
    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # a bar on the screen stands in for it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write, if anybody is there."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if anybody is there."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return True for a screen."""
        with suppress(OSError, ValueError, AttributeError):
            return bool(self._stream.isatty())
        return False

    def fileno(self) -> int:
        """The stream's descriptor."""
        return int(self._stream.fileno())


class Terminal(Console):
    """Rich's console, but lines and bars are ASCII where the stream's encoding is, and broken pipes raise."""

    @property
    def encoding(self) -> str:
        """Return the encoding that the stream can show."""
        return (getattr(self.file, "encoding", None) or "utf-8").lower()

    def on_broken_pipe(self) -> None:
        """Raise what was caught: Rich would end the process with status 1, and be silent from then on."""
        raise


def table(*left: str, right: Iterable[str] = ()) -> Table:
    """Make a table without lines.

    left: titles of columns of words, which are folded where there is no room.
    right: titles of the columns of numbers behind them, which stay whole.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        made.add_column(title, overflow="fold")
    for title in right:
        made.add_column(title, justify="right", no_wrap=True)
    return made


out = Terminal(highlight=False)
err = Terminal(file=cast(IO[str], StandardError()), highlight=False)
