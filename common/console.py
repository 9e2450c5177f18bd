"""Where the commands write: results to standard output, everything about them to standard error."""

from __future__ import annotations

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
